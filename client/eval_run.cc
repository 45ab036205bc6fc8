#include "client/eval_run.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/terminal.h"

namespace carryover {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

size_t CommonPrefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  const size_t most = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + most, b.begin()).first - a.begin();
}

// Whether an item is among those with a control: by its key, so that a resumed run chooses alike.
bool Chosen(const std::string& key, double rate) {
  uint64_t bits = 0;
  CHECK(absl::SimpleHexAtoi(key.substr(0, 13), &bits));
  return static_cast<double>(bits) * 0x1p-52 < rate;
}

}  // namespace

EvalRun::EvalRun(const EvalOptions& options, const ConnectionOptions& connection,
                 CommandContext* context)
    : options_(options),
      connection_(connection),
      context_(*context),
      completions_(v1::Completions::NewStub(Connect(connection.address))),
      fidelity_(v1::Fidelity::NewStub(Connect(connection.admin))) {}

grpc::Status EvalRun::Tokenize(const std::string& text, bool special,
                               std::vector<int32_t>* tokens) {
  v1::TokenizeRequest request;
  request.set_model(options_.model);
  request.set_version(options_.target);
  request.set_text(text);
  request.set_add_special_tokens(special);
  v1::TokenizeResponse response;
  CallContext call(connection_, &context_.interrupt);
  const grpc::Status status = completions_->Tokenize(call.get(), request, &response);
  tokens->assign(response.tokens().begin(), response.tokens().end());
  return status;
}

grpc::Status EvalRun::Prepare(const eval::Item& item, v1::EvaluateRequest* request,
                              eval::ItemResult* result) {
  std::vector<int32_t> prompt;
  if (item.has_ids()) {
    prompt = item.prefix_ids;
    prompt.insert(prompt.end(), item.suffix_ids.begin(), item.suffix_ids.end());
    result->prefix_tokens = static_cast<int>(item.prefix_ids.size());
  } else {
    // What the two texts share is what a cache of the prefix serves: a token may lie across.
    std::vector<int32_t> prefix;
    if (auto status = Tokenize(item.prefix, true, &prefix); !status.ok()) return status;
    if (auto status = Tokenize(item.prefix + item.suffix, true, &prompt); !status.ok()) {
      return status;
    }
    result->prefix_tokens = static_cast<int>(CommonPrefix(prefix, prompt));
  }
  result->prompt_tokens = static_cast<int>(prompt.size());
  result->bucket = eval::PrefixBucketOf(result->prefix_tokens);
  request->mutable_prompt()->mutable_tokens()->mutable_ids()->Assign(prompt.begin(), prompt.end());
  request->set_prefix_tokens(std::max(1, result->prefix_tokens));

  // The first token in which the answer goes on from the prompt. A generated blank may begin the
  // answer, so that "label" should have it where the model is to write one.
  const std::string label =
      !item.label.empty() ? item.label
      : (item.metric == eval::Metric::kStarts || item.metric == eval::Metric::kToken) &&
              !item.answers.empty()
          ? item.answers[0]
          : "";
  if (label.empty()) return grpc::Status::OK;
  std::vector<int32_t> answer;
  if (item.has_ids()) {
    if (auto status = Tokenize(label, false, &answer); !status.ok()) return status;
  } else {
    std::vector<int32_t> whole;
    if (auto status = Tokenize(item.prefix + item.suffix + label, true, &whole); !status.ok()) {
      return status;
    }
    const size_t common = CommonPrefix(prompt, whole);
    if (common == prompt.size()) answer.assign(whole.begin() + common, whole.end());
  }
  if (answer.empty()) return grpc::Status::OK;  // the label melts into the prompt's last token
  result->answer_token = answer[0];
  result->answer_is_single = answer.size() == 1;
  request->add_answer_ids(answer[0]);
  return grpc::Status::OK;
}

grpc::Status EvalRun::Ask(const eval::Item& item, eval::ItemResult* result) {
  v1::EvaluateRequest request;
  if (auto status = Prepare(item, &request, result); !status.ok()) return status;
  request.mutable_prompt()->set_model(options_.model);
  request.mutable_prompt()->set_version(options_.target);
  request.set_source(options_.source);
  request.set_max_tokens(item.max_tokens.value_or(options_.max_tokens));
  for (const std::string& stop : item.stop) request.add_stop(stop);
  request.set_control(Chosen(result->key, options_.control_rate));
  request.set_hit(options_.hit);
  request.set_sensitivity(options_.sensitivity);
  request.mutable_plans()->Assign(options_.plans.begin(), options_.plans.end());
  v1::EvaluateResponse response;
  CallContext call(connection_, &context_.interrupt);
  const grpc::Status status = fidelity_->Evaluate(call.get(), request, &response);
  if (status.ok()) eval::TakeResponse(item, response, result);
  return status;
}

bool EvalRun::ServerAnswers() {
  std::vector<int32_t> tokens;
  return Tokenize("x", false, &tokens).error_code() != grpc::StatusCode::UNAVAILABLE;
}

absl::StatusOr<RunEnd> EvalRun::Run(const std::vector<eval::Item>& items, eval::Journal* journal) {
  Progress progress(context_.err, context_.err_is_terminal);
  const auto start = Clock::now();
  int done = 0, failed = 0, asked = 0;
  for (const auto& [index, row] : journal->rows()) done += row.ok() ? 1 : 0;
  const int total = static_cast<int>(items.size());
  if (done > 0) context_.err << "carryover eval: " << done << " items were done before\n";
  for (int i = 0; i < total; ++i) {
    const auto before = journal->rows().find(i);
    if (before != journal->rows().end() && before->second.ok()) continue;
    if (context_.interrupt.requested()) return RunEnd::kInterrupted;
    const eval::Item& item = items[i];
    eval::ItemResult result;
    result.index = i;
    result.id = item.id;
    result.task = item.task;
    result.metric = item.metric;
    result.answers = item.answers;
    result.key = eval::ItemKey(item);
    result.prefix_key = eval::PrefixKey(item);
    const auto item_start = Clock::now();
    const grpc::Status status = Ask(item, &result);
    result.seconds = Since(item_start);
    if (context_.interrupt.requested() && !status.ok()) return RunEnd::kInterrupted;
    if (!status.ok()) {
      // A comparison that found no room is UNAVAILABLE, too: only a server that answers nothing
      // is gone.
      if (status.error_code() == grpc::StatusCode::UNAVAILABLE && !ServerAnswers()) {
        progress.Finish();
        context_.err << "carryover eval: " << DescribeStatus(status) << "\n";
        return RunEnd::kServerGone;
      }
      result.error_code = StatusCodeName(status.error_code());
      result.error = DescribeStatus(status);
      progress.Finish();
      context_.err << "carryover eval: item " << item.id << ": " << result.error << "\n";
      ++failed;
    } else {
      ++done;
    }
    RETURN_IF_ERROR(journal->Append(result));
    ++asked;
    const double each = Since(start) / asked;
    progress.Update(absl::StrFormat(
        "%d of %d items, %d failed, %.2f s an item, %s left (%s, %d)", done, total, failed, each,
        HumanSeconds(each * (total - done - failed)), item.task, result.prefix_tokens));
  }
  return RunEnd::kDone;
}

}  // namespace carryover
