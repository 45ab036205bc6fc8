#include "client/assemble.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover {

StreamAssembler::StreamAssembler(int choices, std::string request_id)
    : request_id_(std::move(request_id)), finished_(choices, false) {
  for (int i = 0; i < choices; ++i) response_.add_choices()->set_index(i);
}

absl::Status StreamAssembler::CheckIndex(int index, const char* what) const {
  if (index < 0 || index >= response_.choices_size()) {
    return absl::InternalError(
        absl::StrCat("a ", what, " of choice ", index, ", of ", response_.choices_size()));
  }
  if (finished_[index]) {
    return absl::InternalError(absl::StrCat("a ", what, " of choice ", index, " after its finish"));
  }
  return absl::OkStatus();
}

absl::Status StreamAssembler::Add(const v1::CompleteEvent& event) {
  if (done_) return absl::InternalError("an event after done");
  if (!started_ && !event.has_started()) return absl::InternalError("an event before started");
  switch (event.event_case()) {
    case v1::CompleteEvent::kStarted: {
      const auto& started = event.started();
      if (started_) return absl::InternalError("started twice");
      if (started.request_id() != request_id_) {
        return absl::InternalError(absl::StrCat("mixed up: the stream of request '", request_id_,
                                                "' brought '", started.request_id(), "'"));
      }
      started_ = true;
      response_.set_id(started.id());
      response_.set_model(started.model());
      response_.set_version(started.version());
      response_.set_request_id(started.request_id());
      *response_.mutable_usage() = started.usage();
      *response_.mutable_cache() = started.cache();
      return absl::OkStatus();
    }
    case v1::CompleteEvent::kPromptLogprobs:
      response_.mutable_prompt_logprobs()->MergeFrom(event.prompt_logprobs().positions());
      return absl::OkStatus();
    case v1::CompleteEvent::kDelta: {
      const auto& delta = event.delta();
      RETURN_IF_ERROR(CheckIndex(delta.index(), "delta"));
      v1::Choice* choice = response_.mutable_choices(delta.index());
      choice->mutable_text()->append(delta.text());
      choice->mutable_token_ids()->MergeFrom(delta.token_ids());
      choice->mutable_logprobs()->MergeFrom(delta.logprobs());
      return absl::OkStatus();
    }
    case v1::CompleteEvent::kFinished: {
      const auto& finished = event.finished();
      RETURN_IF_ERROR(CheckIndex(finished.index(), "finish"));
      finished_[finished.index()] = true;
      *response_.mutable_choices(finished.index())->mutable_finish() = finished.finish();
      return absl::OkStatus();
    }
    case v1::CompleteEvent::kDone:
      done_ = true;
      *response_.mutable_usage() = event.done().usage();
      *response_.mutable_cache() = event.done().cache();
      *response_.mutable_timing() = event.done().timing();
      return absl::OkStatus();
    case v1::CompleteEvent::EVENT_NOT_SET:
      return absl::OkStatus();  // a kind that this client does not know yet
  }
  return absl::OkStatus();
}

absl::Status StreamAssembler::Complete() const {
  if (!done_) return absl::InternalError("the stream ended without done");
  int64_t tokens = 0;
  for (int i = 0; i < response_.choices_size(); ++i) {
    if (!finished_[i]) return absl::InternalError(absl::StrCat("choice ", i, " did not finish"));
    tokens += response_.choices(i).token_ids_size();
  }
  const v1::Usage& usage = response_.usage();
  if (usage.completion_tokens() != tokens) {
    return absl::InternalError(absl::StrCat("usage counts ", usage.completion_tokens(),
                                            " generated tokens, and ", tokens, " came"));
  }
  const int64_t parts = int64_t{usage.cached_tokens()} + usage.carried_tokens() +
                        usage.repaired_tokens() + usage.computed_tokens();
  if (usage.prompt_tokens() != parts) {
    return absl::InternalError(absl::StrCat("usage counts ", usage.prompt_tokens(),
                                            " prompt tokens, and its parts add up to ", parts));
  }
  return absl::OkStatus();
}

}  // namespace carryover
