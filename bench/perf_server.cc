// What the server does to a message: bytes to the engine's request, and events to bytes.
#include <memory>

#include "base/status_macros.h"
#include "bench/bench_case.h"
#include "bench/perf_work.h"
#include "server/convert.h"

namespace carryover::bench {
namespace {

absl::StatusOr<PerfWork::Body> ReadRequest() {
  v1::CompleteRequest request;
  request.set_model("a model");
  for (const int32_t token : SampleTokens(2048, 49152, 1)) request.mutable_tokens()->add_ids(token);
  request.set_max_tokens(64);
  request.set_temperature(0.7f);
  request.set_top_p(0.95f);
  request.set_seed(7);
  request.add_stop("\n\n");
  request.set_session("a session");
  request.mutable_cache()->set_reuse(v1::CacheOptions::CARRY);
  return PerfWork::Body([bytes = request.SerializeAsString()]() -> absl::Status {
    v1::CompleteRequest read;
    if (!read.ParseFromString(bytes)) return absl::InternalError("not read");
    return FromProto(read, RequestLimits()).status();
  });
}

absl::StatusOr<PerfWork::Body> WriteEvent() {
  PositionLogprobs position;
  position.chosen = {17, " token", -0.5f, 1};
  for (int i = 0; i < 5; ++i) position.top.push_back({i, " other", -1.0f - i, i + 1});
  return PerfWork::Body([position]() -> absl::Status {
    v1::CompleteEvent event;
    v1::CompleteEvent::Delta* const delta = event.mutable_delta();
    delta->set_text(" token");
    delta->add_token_ids(17);
    ToProto(position, delta->add_logprobs());
    return event.SerializeAsString().empty() ? absl::InternalError("not written")
                                             : absl::OkStatus();
  });
}

}  // namespace

void AddServerWork(std::vector<PerfWork>* works) {
  works->push_back({"server/request/tokens=2048", "request", 1, 400, ReadRequest});
  works->push_back({"server/event/logprobs=5", "event", 1, 4000, WriteEvent});
}

}  // namespace carryover::bench
