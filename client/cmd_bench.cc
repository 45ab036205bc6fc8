// carryover bench: loads a server and reports under the field names of vLLM's serving benchmark.
#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/utf8.h"
#include "carryover/v1/completions.grpc.pb.h"
#include "client/commands.h"
#include "client/load_mix.h"
#include "client/load_run.h"
#include "client/load_stats.h"
#include "client/prompt_input.h"
#include "client/reuse.h"
#include "client/terminal.h"

namespace carryover {
namespace {

constexpr int64_t kMaxRequests = 1000000;
constexpr size_t kMaxTextBytes = 4 << 20;
constexpr int kStreamsPerConnection = 64;
constexpr int32_t kVocabularyBound = 1 << 24;

struct Options {
  ConnectionOptions connection = DefaultConnection();
  std::string model, version, salt, task, reuse = "auto", out, records;
  bool store = true;
  MixOptions mix;
  std::optional<std::string> text;
  std::optional<int> vocabulary;
  int64_t requests = 0;
  double seconds = 0;
  int concurrency = 0;
  double rate = 0;
  int warmup = 0;
  int recheck = 0;
  int output_tokens = 16;
  bool ignore_eos = true;
  double temperature = 0;
  std::optional<uint64_t> seed;
  GoodputLimits goodput;
};

void Declare(Options* o, Args* args) {
  args->Group("Load");
  args->Option("concurrency", &o->concurrency, "N",
               "closed loop: keep so many streams going; with --rate, at most so many. Default 1 "
               "without --rate");
  args->Option("rate", &o->rate, "X",
               "open loop: X arrivals a second, as a Poisson process. A request's times count from "
               "when it is sent, which --concurrency may delay");
  args->Option("requests", &o->requests, "N", "how many; default 100, or no bound with --seconds");
  args->Option("seconds", &o->seconds, "X", "send nothing after so long");
  args->Option("warmup", &o->warmup, "N",
               "requests before the run that do not count; with N = prefixes, each is met once");
  args->Group("Prompts and answers");
  args->Option("prefixes", &o->mix.prefixes, "K", "different shared prefixes; default 1");
  args->Option("prefix-tokens", &o->mix.prefix_tokens, "N",
               "length of each; default 0, nothing shared");
  args->Option("suffix-tokens", &o->mix.suffix_tokens, "N",
               "tokens of a request's own; default 32");
  args->Option("output-tokens", &o->output_tokens, "N", "tokens to generate; default 16");
  args->Option("ignore-eos", &o->ignore_eos, "",
               "generate just so many, whatever the model says; default true");
  args->Option("text", &o->text, "FILE", "cut prompts from this text; default: random token ids");
  args->Option("vocabulary", &o->vocabulary, "N",
               "random ids are below N; default: asked of the server");
  args->Option("temperature", &o->temperature, "X", "default 0, greedy");
  args->Option("seed", &o->seed, "N", "of prompts and arrivals; default 0");
  args->Group("Model and cache");
  args->Option("model", &o->model, "NAME", "may be left out when the server has just one");
  args->Option("version", &o->version, "NAME", "default: the promoted one");
  args->Option("reuse", &o->reuse, "MODE", "auto, native or carry, as for complete");
  args->Option("salt", &o->salt, "TEXT", "share cached prefixes only with requests of this salt");
  args->Option("task", &o->task, "NAME", "the kind of work, for metrics by task");
  args->Option("store", &o->store, "",
               "keep what is computed for later requests; default true. With false every request "
               "meets the cache as the run found it");
  args->Group("Report");
  args->Option("out", &o->out, "FILE", "write the JSON report here, too");
  args->Option("records", &o->records, "FILE",
               "write a JSON object a request and line here: when it was sent and its times in ms");
  args->Option("goodput-ttft-ms", &o->goodput.ttft_ms, "X",
               "request_goodput counts requests within all limits that are given");
  args->Option("goodput-tpot-ms", &o->goodput.tpot_ms, "X", "time per output token but the first");
  args->Option("goodput-e2el-ms", &o->goodput.e2el_ms, "X", "the whole request");
  args->Option("recheck", &o->recheck, "N",
               "afterwards send N of the requests again, one at a time, and compare the tokens: "
               "greedy FP32 models must give the same alone and in a crowd");
  args->Example(
      "carryover bench --concurrency 64 --requests 1000 --prefixes 8 --prefix-tokens 1024",
      "eight system prompts, 64 users");
  args->Example("carryover bench --rate 5 --seconds 60 --reuse carry --out carried.json",
                "five arrivals a second for a minute, over an older version's caches");
  args->Note(
      "TTFT is the time to the first generated token, TPOT the mean time between the others of a\n"
      "request, ITL the time between two messages with tokens, E2EL the whole request. "
      "Percentiles\n"
      "interpolate linearly. Each stream is checked: its own id and no other's, every token that "
      "was\n"
      "asked for, counts that add up. What does not pass is failed and counts in broken_streams.\n"
      "Exit codes: 0 all completed, 1 a request failed, 2 wrong arguments, 130 interrupted.");
}

std::string CheckOptions(const Options& o) {
  if (o.concurrency < 0 || o.concurrency > 100000) return "--concurrency is from 1 to 100000";
  if (o.rate < 0 || o.rate > 1e6) return "--rate is above 0, up to 1e6";
  if (o.requests < 0 || o.requests > kMaxRequests) return "--requests is from 1 to 1000000";
  if (o.seconds < 0 || o.seconds > 1e7) return "--seconds is above 0, up to 1e7";
  if (o.warmup < 0 || o.warmup > kMaxRequests) return "--warmup is from 0 to 1000000";
  if (o.recheck < 0) return "--recheck is at least 0";
  if (o.mix.prefixes < 1 || o.mix.prefixes > 1000000) return "--prefixes is from 1 to 1000000";
  if (o.mix.prefix_tokens < 0 || o.mix.prefix_tokens > 10000000) {
    return "--prefix-tokens is from 0 to 10000000";
  }
  if (o.mix.suffix_tokens < 1 || o.mix.suffix_tokens > 10000000) {
    return "--suffix-tokens is from 1 to 10000000";
  }
  if (o.output_tokens < 1) return "--output-tokens is at least 1";
  if (o.vocabulary && *o.vocabulary < 2) return "--vocabulary is at least 2";
  if (!ParseReuse(o.reuse)) return kReuseError;
  return "";
}

// The vocabulary's size, found by asking for the text of ids: out of range ones are refused.
grpc::Status FindVocabulary(v1::Completions::Stub* stub, const Options& options,
                            CommandContext& context, int32_t* size) {
  grpc::Status status;
  const auto known = [&](int32_t id) {
    v1::DetokenizeRequest request;
    request.set_model(options.model);
    request.set_version(options.version);
    request.add_tokens(id);
    v1::DetokenizeResponse response;
    CallContext call(options.connection, &context.interrupt);
    status = stub->Detokenize(call.get(), request, &response);
    return status.ok();
  };
  const auto refused = [&] {
    return status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
           status.error_code() == grpc::StatusCode::OUT_OF_RANGE;
  };
  if (!known(0)) return status;
  int32_t inside = 0, outside = 1;
  while (known(outside)) {
    inside = outside;
    outside *= 2;
    if (outside > kVocabularyBound) {
      return grpc::Status(grpc::StatusCode::OUT_OF_RANGE,
                          "the server refuses no token id; give --vocabulary");
    }
  }
  if (!refused()) return status;
  while (outside - inside > 1) {
    const int32_t middle = inside + (outside - inside) / 2;
    if (known(middle)) {
      inside = middle;
    } else if (refused()) {
      outside = middle;
    } else {
      return status;
    }
  }
  *size = outside;
  return grpc::Status::OK;
}

// Makes the prompts' source. `error` tells what is wrong with the options.
grpc::Status MakeMix(v1::Completions::Stub* stub, const Options& options, CommandContext& context,
                     std::optional<PromptMix>* mix, std::string* error) {
  if (!options.text) {
    int32_t size = options.vocabulary.value_or(0);
    if (!options.vocabulary) {
      const grpc::Status status = FindVocabulary(stub, options, context, &size);
      if (!status.ok()) return status;
    }
    // The first ids are often special tokens, which prompts do not hold.
    *mix = PromptMix::Random(options.mix, std::min(1000, size / 8), size);
    return grpc::Status::OK;
  }
  v1::TokenizeRequest request;
  std::string text;
  if (absl::Status status = ReadFile(*options.text, &text); !status.ok()) {
    *error = std::string(status.message());
    return grpc::Status::OK;
  }
  if (text.size() > kMaxTextBytes) {
    text.resize(kMaxTextBytes);
    text.resize(text.size() - IncompleteUtf8Suffix(text));
  }
  if (FirstInvalidUtf8(text) != text.size()) {
    *error = absl::StrCat("'", *options.text, "' is not valid UTF-8");
    return grpc::Status::OK;
  }
  request.set_model(options.model);
  request.set_version(options.version);
  request.set_text(std::move(text));
  request.set_add_special_tokens(false);
  v1::TokenizeResponse response;
  CallContext call(options.connection, &context.interrupt);
  const grpc::Status status = stub->Tokenize(call.get(), request, &response);
  if (!status.ok()) return status;
  auto made =
      PromptMix::FromText(options.mix, {response.tokens().begin(), response.tokens().end()});
  if (made.ok()) {
    *mix = *std::move(made);
  } else {
    *error = std::string(made.status().message());
  }
  return grpc::Status::OK;
}

v1::CompleteRequest MakeRequest(const Options& options, const PromptMix& mix, int64_t index) {
  v1::CompleteRequest request;
  request.set_model(options.model);
  request.set_version(options.version);
  const std::vector<int32_t> prompt = mix.Prompt(index);
  request.mutable_tokens()->mutable_ids()->Assign(prompt.begin(), prompt.end());
  request.set_max_tokens(options.output_tokens);
  request.set_ignore_eos(options.ignore_eos);
  request.set_temperature(static_cast<float>(options.temperature));
  request.set_seed(MixBits(options.mix.seed, static_cast<uint64_t>(index)));
  request.set_request_id(absl::StrCat("bench-", options.mix.seed, "-", index));
  request.mutable_cache()->set_reuse(*ParseReuse(options.reuse));
  request.mutable_cache()->set_store(options.store);
  request.mutable_cache()->set_salt(options.salt);
  request.mutable_cache()->set_task(options.task);
  return request;
}

// Sends some of the completed requests again, alone. How many gave other tokens than in the crowd.
grpc::Status Recheck(v1::Completions::Stub* stub, const Options& options, CommandContext& context,
                     const PromptMix& mix, const LoadResult& result, int64_t* checked,
                     int64_t* differing) {
  std::vector<const RequestRecord*> completed;
  for (const RequestRecord& record : result.records) {
    if (record.completed) completed.push_back(&record);
  }
  const size_t count = std::min<size_t>(options.recheck, completed.size());
  Progress progress(context.err, context.err_is_terminal);
  for (size_t i = 0; i < count; ++i) {
    const RequestRecord& record = *completed[i * completed.size() / count];
    v1::CompleteRequest request = MakeRequest(options, mix, record.index);
    request.set_version(record.version);
    v1::CompleteResponse response;
    CallContext call(options.connection, &context.interrupt);
    const grpc::Status status = stub->Complete(call.get(), request, &response);
    if (!status.ok()) return status;
    const bool same =
        response.choices_size() == 1 &&
        std::equal(record.token_ids.begin(), record.token_ids.end(),
                   response.choices(0).token_ids().begin(), response.choices(0).token_ids().end());
    ++*checked;
    if (!same) ++*differing;
    progress.Update(absl::StrFormat("rechecking: %d of %d", i + 1, count));
  }
  return grpc::Status::OK;
}

std::string UtcNow() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::tm utc{};
  gmtime_r(&now, &utc);
  return std::string(text, std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc));
}

nlohmann::ordered_json ReportJson(const Options& o, const LoadSummary& summary,
                                  const LoadResult& result) {
  nlohmann::ordered_json json = {
      {"date", UtcNow()},
      {"backend", "carryover"},
      {"model_id", o.model},
      {"version", o.version},
      {"num_prompts", result.records.size()},
      {"request_rate", o.rate > 0 ? nlohmann::ordered_json(o.rate) : nlohmann::ordered_json("inf")},
      {"burstiness", 1.0},
      {"max_concurrency", nullptr},
      {"max_concurrent_requests", result.max_in_flight},
      {"prefixes", o.mix.prefixes},
      {"prefix_tokens", o.mix.prefix_tokens},
      {"suffix_tokens", o.mix.suffix_tokens},
      {"output_tokens", o.output_tokens},
      {"reuse", o.reuse},
      {"temperature", o.temperature},
      {"seed", o.mix.seed},
      {"warmup", o.warmup},
  };
  if (o.concurrency > 0) json["max_concurrency"] = o.concurrency;
  json.update(LoadSummaryToJson(summary));
  return json;
}

void PrintReport(const LoadSummary& s, const LoadResult& result, std::ostream& out) {
  out << absl::StrFormat(
      "%d completed, %d failed in %s; at most %d at once\n"
      "%.2f requests/s, %.1f output tokens/s, %.1f tokens/s in all\n",
      s.completed, s.failed, HumanSeconds(s.duration), result.max_in_flight, s.request_throughput,
      s.output_throughput, s.total_token_throughput);
  if (s.request_goodput) {
    out << absl::StrFormat("%.2f requests/s within the limits\n", *s.request_goodput);
  }
  const double input = std::max<double>(1, static_cast<double>(s.total_input_tokens));
  out << absl::StrFormat(
      "prompt tokens: %d = %.1f%% cached + %.1f%% carried + %.1f%% repaired + %.1f%% computed\n\n",
      s.total_input_tokens, 100.0 * s.cached_tokens / input, 100.0 * s.carried_tokens / input,
      100.0 * s.repaired_tokens / input, 100.0 * s.computed_tokens / input);
  Table table({"ms", "MEAN", "MEDIAN", "STD", "P90", "P99"});
  const auto row = [&table](const char* name, const Distribution& d) {
    const auto number = [](double value) { return absl::StrFormat("%.2f", value); };
    table.Row(
        {name, number(d.mean), number(d.median), number(d.std), number(d.p90), number(d.p99)});
  };
  row("time to first token", s.ttft);
  row("time per output token", s.tpot);
  row("inter-token latency", s.itl);
  row("end to end", s.e2el);
  table.Print(out);
  for (const auto& [code, count] : s.errors) {
    out << absl::StrFormat("%d failed with %s; the first: %s\n", count, code, s.messages.at(code));
  }
}

std::vector<std::unique_ptr<v1::Completions::Stub>> Stubs(const Options& options,
                                                          Interrupt* interrupt) {
  // gRPC gives equal channels one connection, unless told not to.
  const int count = std::clamp(options.concurrency / kStreamsPerConnection, 1, 16);
  std::vector<std::unique_ptr<v1::Completions::Stub>> stubs;
  for (int i = 0; i < count; ++i) {
    const std::shared_ptr<grpc::Channel> channel = ConnectAlone(options.connection.address);
    ConnectNow(channel.get(), interrupt);
    stubs.push_back(v1::Completions::NewStub(channel));
  }
  return stubs;
}

}  // namespace

int RunBench(CommandContext& context) {
  Options options;
  Args args("bench",
            "Loads a server and measures: closed or open loop, prompts that share prefixes.");
  Declare(&options, &args);
  if (auto code = ParseOrExit(&args, &options.connection, context)) return *code;
  if (const std::string error = CheckOptions(options); !error.empty()) {
    return UsageError(context, "bench", error);
  }
  options.mix.seed = options.seed.value_or(0);
  if (options.requests == 0) options.requests = options.seconds > 0 ? kMaxRequests : 100;
  if (options.concurrency == 0 && options.rate == 0) options.concurrency = 1;

  const auto stubs = Stubs(options, &context.interrupt);
  std::optional<PromptMix> mix;
  std::string error;
  const grpc::Status status = MakeMix(stubs[0].get(), options, context, &mix, &error);
  if (!status.ok()) {
    return FailedCall(context, options.connection, options.connection.address, status);
  }
  if (!error.empty()) return UsageError(context, "bench", error);

  LoadRunOptions run;
  run.requests = options.requests;
  run.max_in_flight = options.concurrency;
  run.max_seconds = options.seconds;
  run.request_timeout = options.connection.timeout_seconds.value_or(0);
  run.output_tokens = options.ignore_eos ? options.output_tokens : 0;
  run.keep_tokens = options.recheck > 0;

  Progress progress(context.err, context.err_is_terminal);
  const auto show = [&progress](const char* phase, const LoadProgress& p) {
    progress.Update(absl::StrFormat("%s %4.0f s: %d done, %d running, %d failed, %.0f tokens/s",
                                    phase, p.seconds, p.completed, p.in_flight, p.failed,
                                    static_cast<double>(p.output_tokens) / p.seconds));
  };
  if (options.warmup > 0) {
    LoadRunOptions warmup = run;
    warmup.requests = options.warmup;
    warmup.max_seconds = 0;
    warmup.max_in_flight = std::max(1, options.concurrency);
    RunLoad(
        warmup, stubs, [&](int64_t i) { return MakeRequest(options, *mix, -1 - i); },
        [&](const LoadProgress& p) { show("warm-up", p); }, &context.interrupt);
  }
  if (options.rate > 0) {
    run.arrivals = PoissonArrivals(options.rate, options.requests, options.mix.seed);
  }
  const LoadResult result = RunLoad(
      run, stubs, [&](int64_t i) { return MakeRequest(options, *mix, i); },
      [&](const LoadProgress& p) { show("run", p); }, &context.interrupt);
  progress.Finish();

  const LoadSummary summary = SummarizeLoad(result.records, result.duration, options.goodput);
  nlohmann::ordered_json report = ReportJson(options, summary, result);
  int64_t rechecked = 0, differing = 0;
  if (options.recheck > 0 && !context.interrupt.requested()) {
    const grpc::Status again =
        Recheck(stubs[0].get(), options, context, *mix, result, &rechecked, &differing);
    if (!again.ok()) {
      return FailedCall(context, options.connection, options.connection.address, again);
    }
    report["rechecked"] = rechecked;
    report["recheck_differing"] = differing;
  }
  if (!options.out.empty()) {
    std::ofstream file(options.out);
    PrintJson(file, report);
    file.close();
    if (!file) {
      context.err << "carryover bench: cannot write '" << options.out << "'\n";
      return kExitFailed;
    }
  }
  if (!options.records.empty()) {
    std::ofstream file(options.records);
    for (const RequestRecord& record : result.records) file << RecordToJson(record).dump() << '\n';
    file.close();
    if (!file) {
      context.err << "carryover bench: cannot write '" << options.records << "'\n";
      return kExitFailed;
    }
  }
  if (options.connection.json) {
    PrintJson(context.out, report);
  } else {
    PrintReport(summary, result, context.out);
    if (rechecked > 0) {
      context.out << absl::StrFormat("%d sent again alone, %d differ\n", rechecked, differing);
    }
  }
  if (context.interrupt.requested()) return kExitInterrupted;
  return summary.failed == 0 && summary.completed > 0 && differing == 0 ? kExitOk : kExitFailed;
}

}  // namespace carryover
