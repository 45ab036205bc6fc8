// carryover complete: one completion, printed as it comes.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "client/assemble.h"
#include "client/commands.h"
#include "client/message_json.h"
#include "client/prompt_input.h"
#include "client/reuse.h"

namespace carryover {
namespace {

using SteadyClock = std::chrono::steady_clock;

struct Options {
  ConnectionOptions connection = DefaultConnection();
  PromptInput input;
  std::string model, version, request_id, session, salt, task, reuse = "auto";
  std::optional<int> max_tokens, min_tokens, top_k, n, logprobs, prompt_logprobs,
      truncate_prompt_tokens, priority;
  std::optional<double> temperature, top_p, min_p, presence_penalty, frequency_penalty,
      repetition_penalty;
  std::optional<uint64_t> seed;
  std::optional<bool> include_stop, ignore_eos, echo, skip_special_tokens, store, stream;
  std::vector<std::string> logit_bias, stop;
  std::vector<int32_t> stop_token_ids;
  bool quiet = false;
};

void Declare(Options* o, Args* args) {
  o->input.AddOptions(args);
  args->Group("Model");
  args->Option("model", &o->model, "NAME", "may be left out when the server has just one");
  args->Option("version", &o->version, "NAME", "default: the promoted one");
  args->Group("Length and stops");
  args->Option("max-tokens", &o->max_tokens, "N", "tokens to generate; 0 only fills the cache");
  args->Option("min-tokens", &o->min_tokens, "N", "no stop token before so many");
  args->Option("stop", &o->stop, "TEXT", "end before this text; may be repeated");
  args->Option("stop-token-ids", &o->stop_token_ids, "ID,ID,...", "end at these tokens");
  args->Option("include-stop", &o->include_stop, "", "keep what ended it in the text");
  args->Option("ignore-eos", &o->ignore_eos, "", "go on after the model's end tokens");
  args->Option("truncate-prompt-tokens", &o->truncate_prompt_tokens, "N",
               "keep only the prompt's last N tokens");
  args->Group("Sampling");
  args->Option("temperature", &o->temperature, "X", "0 is greedy");
  args->Option("top-p", &o->top_p, "X", "most likely tokens with this much probability");
  args->Option("top-k", &o->top_k, "N", "only the N most likely tokens; 0: all");
  args->Option("min-p", &o->min_p, "X", "only tokens this likely, as a share of the most likely");
  args->Option("presence-penalty", &o->presence_penalty, "X", "off the logits of generated tokens");
  args->Option("frequency-penalty", &o->frequency_penalty, "X", "the same, for each time");
  args->Option("repetition-penalty", &o->repetition_penalty, "X",
               "divides the logits of tokens in the prompt or generated");
  args->Option("logit-bias", &o->logit_bias, "ID:X", "added to a token's logit; may be repeated");
  args->Option("seed", &o->seed, "N", "the same seed gives the same text");
  args->Option("n", &o->n, "N", "choices");
  args->Group("What the answer holds");
  args->Option("logprobs", &o->logprobs, "N",
               "log-probabilities, with N alternatives; shown with --json");
  args->Option("prompt-logprobs", &o->prompt_logprobs, "N",
               "the same for the prompt; shown with --json");
  args->Option("echo", &o->echo, "", "put the prompt before the text");
  args->Option("skip-special-tokens", &o->skip_special_tokens, "", "leave them out; default true");
  args->Option("stream", &o->stream, "",
               "print as it comes; default: true on a terminal and with --json, which then has the "
               "time to the first token");
  args->Option("quiet", &o->quiet, "", "without the summary on standard error");
  args->Group("Cache and queue");
  args->Option("reuse", &o->reuse, "MODE",
               "auto (the server decides), native (only blocks of the serving version), carry "
               "(blocks of the versions that it names in carry_from too)");
  args->Option("salt", &o->salt, "TEXT", "share cached prefixes only with requests of this salt");
  args->Option("store", &o->store, "", "keep this request's blocks for others; default true");
  args->Option("task", &o->task, "NAME", "the kind of work, for metrics by task");
  args->Option("priority", &o->priority, "N", "lower runs earlier; default 0");
  args->Option("request-id", &o->request_id, "TEXT", "given back in the answer");
  args->Option("session", &o->session, "TEXT",
               "one session meets one version while traffic is shared");
  args->Example("carryover complete --prompt 'The capital of France is' --max-tokens 16", "");
  args->Example("carryover complete --prompt-file doc.txt --temperature 0 --reuse carry --json",
                "greedy, over caches of an older version, with usage and timing");
  args->Note("Exit codes: 0 done, 1 the request failed, 2 wrong arguments, 130 interrupted.");
}

// The first thing that is wrong with it, or OK.
absl::Status FillRequest(Options* o, v1::CompleteRequest* request) {
  if (absl::Status status = o->input.Resolve(); !status.ok()) return status;
  o->input.Fill(request);
  request->set_model(o->model);
  request->set_version(o->version);
  request->set_request_id(o->request_id);
  request->set_session(o->session);
  if (o->max_tokens) request->set_max_tokens(*o->max_tokens);
  if (o->min_tokens) request->set_min_tokens(*o->min_tokens);
  if (o->top_k) request->set_top_k(*o->top_k);
  if (o->n) request->set_n(*o->n);
  if (o->logprobs) request->set_logprobs(*o->logprobs);
  if (o->prompt_logprobs) request->set_prompt_logprobs(*o->prompt_logprobs);
  if (o->truncate_prompt_tokens) request->set_truncate_prompt_tokens(*o->truncate_prompt_tokens);
  if (o->priority) request->set_priority(*o->priority);
  if (o->temperature) request->set_temperature(static_cast<float>(*o->temperature));
  if (o->top_p) request->set_top_p(static_cast<float>(*o->top_p));
  if (o->min_p) request->set_min_p(static_cast<float>(*o->min_p));
  if (o->presence_penalty) {
    request->set_presence_penalty(static_cast<float>(*o->presence_penalty));
  }
  if (o->frequency_penalty) {
    request->set_frequency_penalty(static_cast<float>(*o->frequency_penalty));
  }
  if (o->repetition_penalty) {
    request->set_repetition_penalty(static_cast<float>(*o->repetition_penalty));
  }
  if (o->seed) request->set_seed(*o->seed);
  if (o->include_stop) request->set_include_stop(*o->include_stop);
  if (o->ignore_eos) request->set_ignore_eos(*o->ignore_eos);
  if (o->echo) request->set_echo(*o->echo);
  if (o->skip_special_tokens) request->set_skip_special_tokens(*o->skip_special_tokens);
  for (const std::string& stop : o->stop) request->add_stop(stop);
  request->mutable_stop_token_ids()->Assign(o->stop_token_ids.begin(), o->stop_token_ids.end());
  for (const std::string& bias : o->logit_bias) {
    const std::vector<std::string> parts = absl::StrSplit(bias, absl::MaxSplits(':', 1));
    int32_t token;
    float value;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &token) ||
        !absl::SimpleAtof(parts[1], &value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--logit-bias takes ID:X, as 42:-1.5, not '", bias, "'"));
    }
    (*request->mutable_logit_bias())[token] = value;
  }
  v1::CacheOptions* cache = request->mutable_cache();
  cache->set_salt(o->salt);
  cache->set_task(o->task);
  if (o->store) cache->set_store(*o->store);
  const auto reuse = ParseReuse(o->reuse);
  if (!reuse) return absl::InvalidArgumentError(kReuseError);
  cache->set_reuse(*reuse);
  return absl::OkStatus();
}

double MsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double, std::milli>(SteadyClock::now() - start).count();
}

struct Result {
  grpc::Status status;
  v1::CompleteResponse response;
  std::optional<double> ttft_ms;  // first generated token, seen from here
  double e2e_ms = 0;
  std::string warning;  // the answer does not add up
};

Result CallUnary(v1::Completions::Stub* stub, CallContext* call,
                 const v1::CompleteRequest& request) {
  Result result;
  const auto start = SteadyClock::now();
  result.status = stub->Complete(call->get(), request, &result.response);
  result.e2e_ms = MsSince(start);
  return result;
}

// live: print the text as it comes.
Result CallStream(v1::Completions::Stub* stub, CallContext* call,
                  const v1::CompleteRequest& request, std::ostream* live) {
  Result result;
  const int choices = request.has_n() ? std::max(1, std::min(request.n(), 1 << 20)) : 1;
  StreamAssembler assembler(choices, request.request_id());
  const auto start = SteadyClock::now();
  auto reader = stub->CompleteStream(call->get(), request);
  v1::CompleteEvent event;
  absl::Status sound;
  while (reader->Read(&event)) {
    if (event.has_delta() && !result.ttft_ms && event.delta().token_ids_size() > 0) {
      result.ttft_ms = MsSince(start);
    }
    if (sound.ok()) sound = assembler.Add(event);
    if (live != nullptr && event.has_delta()) *live << event.delta().text() << std::flush;
  }
  result.status = reader->Finish();
  result.e2e_ms = MsSince(start);
  if (result.status.ok() && sound.ok()) sound = assembler.Complete();
  if (!sound.ok()) result.warning = std::string(sound.message());
  result.response = assembler.response();
  return result;
}

void PrintSummary(const Result& result, std::ostream& err) {
  const v1::CompleteResponse& r = result.response;
  const v1::Usage& usage = r.usage();
  std::vector<std::string> segments;
  for (const auto& segment : r.cache().segments()) {
    segments.push_back(absl::StrCat(segment.tokens(), " ", segment.plan(),
                                    segment.plan() == "fresh" ? "" : " of ",
                                    segment.plan() == "fresh" ? "" : segment.source(),
                                    segment.tier().empty() ? "" : " in ", segment.tier()));
  }
  err << absl::StrFormat("[%s %s] %d prompt tokens", r.model(), r.version(), usage.prompt_tokens());
  if (!segments.empty()) err << " (" << absl::StrJoin(segments, " + ") << ")";
  err << absl::StrFormat(", %d generated", usage.completion_tokens());
  for (const v1::Choice& choice : r.choices()) {
    if (r.choices_size() == 1) {
      err << ", " << v1::Finish::Reason_Name(choice.finish().reason());
    }
  }
  if (result.ttft_ms) err << absl::StrFormat(", first after %.1f ms", *result.ttft_ms);
  err << absl::StrFormat(", all after %.1f ms\n", result.e2e_ms);
}

void PrintText(const Result& result, bool printed, CommandContext& context) {
  const auto& choices = result.response.choices();
  if (!printed) {
    for (const v1::Choice& choice : choices) {
      if (choices.size() > 1) context.out << "--- " << choice.index() << "\n";
      context.out << choice.text();
      if (choices.size() > 1 || context.out_is_terminal) context.out << "\n";
    }
  } else if (context.out_is_terminal) {
    context.out << "\n";
  }
  context.out << std::flush;
}

}  // namespace

int RunComplete(CommandContext& context) {
  Options options;
  Args args("complete", "Completes a prompt and prints the text as it comes.");
  Declare(&options, &args);
  if (auto code = ParseOrExit(&args, &options.connection, context)) return *code;
  v1::CompleteRequest request;
  if (absl::Status status = FillRequest(&options, &request); !status.ok()) {
    return UsageError(context, "complete", status.message());
  }

  const bool json = options.connection.json;
  const bool stream = options.stream.value_or(json || context.out_is_terminal);
  const bool live = stream && !json && request.n() <= 1;
  const std::shared_ptr<grpc::Channel> channel = Connect(options.connection.address);
  ConnectNow(channel.get(), &context.interrupt);
  auto stub = v1::Completions::NewStub(channel);
  CallContext call(options.connection, &context.interrupt);
  const Result result = stream
                            ? CallStream(stub.get(), &call, request, live ? &context.out : nullptr)
                            : CallUnary(stub.get(), &call, request);
  if (!result.status.ok()) {
    if (live && context.out_is_terminal) context.out << std::endl;
    return FailedCall(context, options.connection, options.connection.address, result.status);
  }
  if (!result.warning.empty()) {
    context.err << "carryover: warning: the answer does not add up: " << result.warning << "\n";
  }
  if (json) {
    nlohmann::ordered_json out = MessageToJson(result.response);
    out["client"] = {{"ttft_ms", nullptr}, {"e2e_ms", result.e2e_ms}};
    if (result.ttft_ms) out["client"]["ttft_ms"] = *result.ttft_ms;
    PrintJson(context.out, out);
    return kExitOk;
  }
  PrintText(result, live, context);
  if (!options.quiet) PrintSummary(result, context.err);
  return kExitOk;
}

}  // namespace carryover
