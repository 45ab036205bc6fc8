// What the engine and the services tell, as Prometheus counters and histograms; samples also go to
// who watches them. Names and meanings are listed in docs/metrics.md. Thread-safe; methods take one
// short lock each.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "engine/observer.h"
#include "server/fidelity_metrics.h"
#include "server/gate_change_log.h"
#include "server/sample_feed.h"
#include "server/trial_metrics.h"

namespace carryover {

class PrometheusObserver final : public EngineObserver {
 public:
  explicit PrometheusObserver(const FidelityMetricsOptions& fidelity = {});

  // An ended gRPC call.
  void OnCall(absl::string_view method, absl::StatusCode code);

  void OnRequestDone(const RequestRecord& record) override;
  void OnRejected(absl::string_view reason) override;
  void OnInterTokenLatency(double seconds) override;
  void OnBlockLoad(absl::string_view tier, double seconds) override;
  void OnStoreLookup(int lookup_tokens) override;
  void OnStoreHit(absl::string_view provenance, absl::string_view tier, int tokens) override;
  void OnPreemption() override;
  void OnPairDeclared(const VersionPair& pair) override {
    fidelity_.Declare(pair);
    trial_.Declare(pair);
  }
  void OnPairRemoved(const VersionPair& pair) override {
    fidelity_.Remove(pair);
    trial_.Remove(pair);
  }
  void OnFidelitySample(const FidelitySample& sample) override {
    fidelity_.Observe(sample);
    samples_.Tell(sample);
  }
  void OnTrialDone(const TrialRecord& record) override { trial_.Observe(record); }
  void OnShadowEnded(absl::string_view arm, absl::string_view outcome) override;
  void OnShadowLag(double seconds) override;
  void OnShadowTokens(int tokens) override;
  void OnShadowDelay(double seconds) override;
  void OnRefreshEnded(absl::string_view outcome) override;
  void OnRefreshedBlocks(int blocks) override;
  void OnMappedAhead(int blocks) override;
  void OnGateChange(const GateChange& change) override;

  const std::shared_ptr<prometheus::Registry>& registry() const { return registry_; }
  const GateChangeLog& gate_change_log() const { return gate_change_log_; }
  // Who watches samples gets them here.
  SampleFeed& samples() { return samples_; }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>& calls_;
  prometheus::Family<prometheus::Counter>& finished_;
  prometheus::Family<prometheus::Counter>& rejected_;
  prometheus::Family<prometheus::Histogram>& first_token_;
  prometheus::Family<prometheus::Histogram>& first_token_part_;
  prometheus::Histogram& inter_token_;
  prometheus::Histogram& duration_;
  prometheus::Histogram& queue_;
  prometheus::Family<prometheus::Histogram>& block_load_;
  prometheus::Family<prometheus::Counter>& prompt_tokens_;
  prometheus::Counter& generation_tokens_;
  prometheus::Counter& lookup_tokens_;
  prometheus::Family<prometheus::Counter>& hit_tokens_;
  prometheus::Counter& preemptions_;
  prometheus::Family<prometheus::Counter>& shadows_;
  prometheus::Histogram& shadow_lag_;
  prometheus::Histogram& shadow_delay_;
  prometheus::Family<prometheus::Counter>& refresh_ended_;
  prometheus::Counter& shadow_tokens_;
  prometheus::Counter& refreshed_;
  prometheus::Counter& mapped_ahead_;
  prometheus::Family<prometheus::Counter>& gate_changes_;
  GateChangeLog gate_change_log_;
  FidelityMetrics fidelity_;
  TrialMetrics trial_;
  SampleFeed samples_;
};

}  // namespace carryover
