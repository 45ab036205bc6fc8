#include "server/prometheus_observer.h"

#include <algorithm>
#include <string>
#include <vector>

namespace carryover {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Histogram;
using Buckets = Histogram::BucketBoundaries;

// Time between tokens in vLLM's buckets, so that dashboards carry over.
const Buckets& InterTokenBuckets() {
  static const auto* buckets = new Buckets{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                           0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
  return *buckets;
}
const Buckets& RequestBuckets() {
  static const auto* buckets =
      new Buckets{0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1,   1.5, 2,   2.5, 5,    10,
                  15,   20,   30,  40,  50,  60,  120, 240, 480, 960, 1920, 7680};
  return *buckets;
}
const Buckets& LoadBuckets() {
  static const auto* buckets =
      new Buckets{1e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10};
  return *buckets;
}

Family<Counter>& Counters(prometheus::Registry* registry, const char* name, const char* help) {
  return BuildCounter().Name(name).Help(help).Register(*registry);
}
Family<Histogram>& Histograms(prometheus::Registry* registry, const char* name, const char* help) {
  return BuildHistogram().Name(name).Help(help).Register(*registry);
}

void Increment(Family<Counter>* family, const prometheus::Labels& labels, double by = 1) {
  family->Add(labels).Increment(by);
}

}  // namespace

PrometheusObserver::PrometheusObserver(const FidelityMetricsOptions& fidelity)
    : registry_(std::make_shared<prometheus::Registry>()),
      calls_(Counters(registry_.get(), "carryover_requests_total",
                      "gRPC calls that ended, by method and status code.")),
      finished_(
          Counters(registry_.get(), "carryover_finished_total", "Choices that ended, by reason.")),
      rejected_(Counters(registry_.get(), "carryover_requests_rejected_total",
                         "Requests refused before they were queued, by reason.")),
      first_token_(Histograms(registry_.get(), "carryover_time_to_first_token_seconds",
                              "From accepting a request to its first token, by plan.")),
      first_token_part_(Histograms(registry_.get(), "carryover_first_token_part_seconds",
                                   "The time to the first token, by plan, in three parts that add "
                                   "up: in the queue, waiting for blocks, the rest.")),
      inter_token_(Histograms(registry_.get(), "carryover_inter_token_latency_seconds",
                              "Between two tokens of a choice.")
                       .Add({}, InterTokenBuckets())),
      duration_(Histograms(registry_.get(), "carryover_request_duration_seconds",
                           "From accepting a request to its end.")
                    .Add({}, RequestBuckets())),
      queue_(Histograms(registry_.get(), "carryover_queue_seconds",
                        "From accepting a request to its first step.")
                 .Add({}, RequestBuckets())),
      block_load_(Histograms(registry_.get(), "carryover_block_load_seconds",
                             "Waiting for blocks of a slower tier, by tier.")),
      prompt_tokens_(Counters(registry_.get(), "carryover_prompt_tokens_total",
                              "Prompt tokens of started requests, by where they came from.")),
      generation_tokens_(
          Counters(registry_.get(), "carryover_generation_tokens_total", "Generated tokens.")
              .Add({})),
      lookup_tokens_(Counters(registry_.get(), "carryover_store_lookup_tokens_total",
                              "Prompt tokens that were looked up in the store.")
                         .Add({})),
      hit_tokens_(Counters(registry_.get(), "carryover_store_hit_tokens_total",
                           "Prompt tokens whose blocks were found and used, by who computed them "
                           "and tier.")),
      preemptions_(Counters(registry_.get(), "carryover_preemptions_total",
                            "Sequences that gave their blocks up and were computed again.")
                       .Add({})),
      shadows_(Counters(registry_.get(), "carryover_shadow_total",
                        "Arms that were to be compared, by arm and how they ended.")),
      shadow_lag_(Histograms(registry_.get(), "carryover_shadow_lag_seconds",
                             "From a request's end to the start of its other arms.")
                      .Add({}, RequestBuckets())),
      shadow_delay_(Histograms(registry_.get(), "carryover_shadow_delay_seconds",
                               "How long work that came waited for background work to give way.")
                        .Add({}, Buckets{0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
                                         0.05, 0.1, 0.2, 0.5, 1})),
      refresh_ended_(Counters(registry_.get(), "carryover_refresh_total",
                              "Carried prefixes that were to become native in idle time.")),
      shadow_tokens_(Counters(registry_.get(), "carryover_shadow_tokens_total",
                              "Tokens that background passes computed.")
                         .Add({})),
      refreshed_(Counters(registry_.get(), "carryover_refresh_blocks_total",
                          "Native blocks stored where carried ones had served.")
                     .Add({})),
      mapped_ahead_(Counters(registry_.get(), "carryover_mapped_ahead_blocks_total",
                             "Blocks mapped for a promoted version before a request asked.")
                        .Add({})),
      gate_changes_(Counters(registry_.get(), "carryover_gate_transitions_total",
                             "Changes of a cell's state, by states and cause.")),
      fidelity_(fidelity, registry_.get()),
      trial_(fidelity, registry_.get()) {
  // Series that exist from the start, so that rates are right from the first event on.
  for (const char* reason : {"stop_token", "stop_string", "length", "cancelled"}) {
    finished_.Add({{"reason", reason}});
  }
  for (const char* reason : {"queue_requests", "queue_tokens", "draining"}) {
    rejected_.Add({{"reason", reason}});
  }
  std::vector<std::string> plans = fidelity.ladder;
  plans.push_back("native");
  for (const std::string& plan : plans) {
    first_token_.Add({{"plan", plan}}, FirstTokenBuckets());
    for (const char* part : {"queue", "load", "compute"}) {
      first_token_part_.Add({{"plan", plan}, {"part", part}}, FirstTokenBuckets());
    }
  }
  for (const char* arm : {"native", "carried", "control", "old"}) {
    for (const char* outcome : {"completed", "queue_full", "too_old", "no_blocks", "evicted",
                                "cancelled", "version", "draining", "failed"}) {
      shadows_.Add({{"arm", arm}, {"outcome", outcome}});
    }
  }
  for (const char* source : {"computed", "cached", "carried", "repaired"}) {
    prompt_tokens_.Add({{"source", source}});
  }
}

void PrometheusObserver::OnCall(absl::string_view method, absl::StatusCode code) {
  Increment(&calls_, {{"method", std::string(method)}, {"code", absl::StatusCodeToString(code)}});
}

void PrometheusObserver::OnRequestDone(const RequestRecord& record) {
  for (const FinishReason reason : record.reasons)
    Increment(&finished_, {{"reason", FinishReasonName(reason)}});
  duration_.Observe(record.timing.total);
  if (record.started) {
    queue_.Observe(record.timing.queue);
    first_token_.Add({{"plan", record.plan}}, FirstTokenBuckets())
        .Observe(record.timing.first_token);
    const auto part = [&](const char* name, double seconds) {
      first_token_part_.Add({{"plan", record.plan}, {"part", name}}, FirstTokenBuckets())
          .Observe(seconds);
    };
    const Timing& timing = record.timing;
    part("queue", timing.queue);
    part("load", timing.load);
    part("compute", std::max(0.0, timing.first_token - timing.queue - timing.load));
  }
  const Usage& usage = record.usage;
  Increment(&prompt_tokens_, {{"source", "computed"}}, usage.computed_tokens);
  Increment(&prompt_tokens_, {{"source", "cached"}}, usage.cached_tokens);
  Increment(&prompt_tokens_, {{"source", "carried"}}, usage.carried_tokens);
  Increment(&prompt_tokens_, {{"source", "repaired"}}, usage.repaired_tokens);
  generation_tokens_.Increment(usage.completion_tokens);
}

void PrometheusObserver::OnRejected(absl::string_view reason) {
  Increment(&rejected_, {{"reason", std::string(reason)}});
}

void PrometheusObserver::OnInterTokenLatency(double seconds) { inter_token_.Observe(seconds); }

void PrometheusObserver::OnBlockLoad(absl::string_view tier, double seconds) {
  block_load_.Add({{"tier", std::string(tier)}}, LoadBuckets()).Observe(seconds);
}

void PrometheusObserver::OnStoreLookup(int lookup_tokens) {
  lookup_tokens_.Increment(lookup_tokens);
}

void PrometheusObserver::OnStoreHit(absl::string_view provenance, absl::string_view tier,
                                    int tokens) {
  Increment(&hit_tokens_, {{"provenance", std::string(provenance)}, {"tier", std::string(tier)}},
            tokens);
}

void PrometheusObserver::OnPreemption() { preemptions_.Increment(); }

void PrometheusObserver::OnShadowEnded(absl::string_view arm, absl::string_view outcome) {
  Increment(&shadows_, {{"arm", std::string(arm)}, {"outcome", std::string(outcome)}});
}

void PrometheusObserver::OnShadowLag(double seconds) { shadow_lag_.Observe(seconds); }

void PrometheusObserver::OnShadowTokens(int tokens) { shadow_tokens_.Increment(tokens); }

void PrometheusObserver::OnShadowDelay(double seconds) { shadow_delay_.Observe(seconds); }

void PrometheusObserver::OnRefreshEnded(absl::string_view outcome) {
  Increment(&refresh_ended_, {{"outcome", std::string(outcome)}});
}

void PrometheusObserver::OnRefreshedBlocks(int blocks) { refreshed_.Increment(blocks); }

void PrometheusObserver::OnMappedAhead(int blocks) { mapped_ahead_.Increment(blocks); }

void PrometheusObserver::OnGateChange(const GateChange& change) {
  Increment(&gate_changes_, {{"from", change.from}, {"to", change.to}, {"reason", change.cause}});
  gate_change_log_.Add(change);
}

}  // namespace carryover
