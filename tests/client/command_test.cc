// Whole commands against the fake server: output, exit codes, errors.
#include "client/command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

#include "client/commands.h"
#include "google/rpc/status_details.pb.h"
#include "tests/client/fake_server.h"

namespace carryover {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

class CommandTest : public testing::Test {
 protected:
  // Runs a command and returns its exit code; what it printed is in out and err.
  int Run(int (*command)(CommandContext&), std::vector<std::string> arguments) {
    out_stream_.str("");
    err_stream_.str("");
    arguments.push_back("--address=" + server_.address);
    arguments.push_back("--admin=" + server_.address);
    CommandContext context{.arguments = std::move(arguments),
                           .out = out_stream_,
                           .err = err_stream_,
                           .interrupt = interrupt_};
    const int code = command(context);
    out_ = out_stream_.str();
    err_ = err_stream_.str();
    return code;
  }
  Json OutJson() const { return Json::parse(out_, nullptr, false); }

  FakeServer server_;
  Interrupt interrupt_;
  std::ostringstream out_stream_, err_stream_;
  std::string out_, err_;
};

// The status with details, as the server packs it.
grpc::Status WithDetails(grpc::StatusCode code, const std::string& message,
                         const std::vector<const google::protobuf::Message*>& details) {
  google::rpc::Status packed;
  packed.set_code(code);
  packed.set_message(message);
  for (const auto* detail : details) packed.add_details()->PackFrom(*detail);
  return grpc::Status(code, message, packed.SerializeAsString());
}

TEST_F(CommandTest, StreamAndUnaryPrintTheSameText) {
  ASSERT_EQ(Run(RunComplete, {"--tokens=1,2,3", "--max-tokens=4", "--stream"}), kExitOk) << err_;
  const std::string streamed = out_;
  ASSERT_EQ(Run(RunComplete, {"--tokens=1,2,3", "--max-tokens=4"}), kExitOk);
  EXPECT_EQ(streamed, out_);
  EXPECT_EQ(std::count(out_.begin(), out_.end(), ' '), 4);
  EXPECT_THAT(err_, HasSubstr("3 prompt tokens"));
}

TEST_F(CommandTest, CompleteJsonHasAllParts) {
  ASSERT_EQ(
      Run(RunComplete, {"--prompt=héllo", "--n=2", "--max-tokens=3", "--request-id=r7", "--json"}),
      kExitOk)
      << err_;
  const Json json = OutJson();
  EXPECT_EQ(json["request_id"], "r7");
  EXPECT_EQ(json["choices"].size(), 2u);
  EXPECT_EQ(json["choices"][1]["token_ids"].size(), 3u);
  EXPECT_EQ(json["choices"][1]["finish"]["reason"], "LENGTH");
  EXPECT_EQ(json["usage"]["completion_tokens"], 6);
  EXPECT_GT(json["client"]["ttft_ms"].get<double>(), 0);
  EXPECT_GE(json["client"]["e2e_ms"].get<double>(), json["client"]["ttft_ms"].get<double>());
}

TEST_F(CommandTest, EveryOptionReachesTheRequest) {
  v1::CompleteRequest seen;
  server_.bend = [&](const v1::CompleteRequest& request, v1::CompleteEvent*) {
    seen = request;
    return true;
  };
  ASSERT_EQ(Run(RunComplete, {"--prompt=x",
                              "--stream",
                              "--model=m",
                              "--version=v",
                              "--max-tokens=2",
                              "--min-tokens=0",
                              "--temperature=0",
                              "--top-p=0.5",
                              "--top-k=0",
                              "--min-p=0.25",
                              "--presence-penalty=-1",
                              "--frequency-penalty=1",
                              "--repetition-penalty=2",
                              "--logit-bias=5:-1.5",
                              "--seed=0",
                              "--n=1",
                              "--stop=a",
                              "--stop=b",
                              "--stop-token-ids=7,8",
                              "--include-stop",
                              "--ignore-eos=false",
                              "--logprobs=0",
                              "--prompt-logprobs=1",
                              "--echo",
                              "--skip-special-tokens=false",
                              "--add-special-tokens=false",
                              "--truncate-prompt-tokens=9",
                              "--priority=-2",
                              "--session=s",
                              "--salt=t",
                              "--store=false",
                              "--task=k",
                              "--reuse=carry"}),
            kExitOk)
      << err_;
  // Every field of the request is set, so that a new one is not forgotten here.
  const auto* descriptor = v1::CompleteRequest::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    if (field->name() == "tokens" || field->name() == "request_id") continue;
    const auto* reflection = seen.GetReflection();
    EXPECT_TRUE(field->is_repeated() ? reflection->FieldSize(seen, field) > 0
                                     : reflection->HasField(seen, field))
        << field->name();
  }
  EXPECT_EQ(seen.temperature(), 0);
  EXPECT_EQ(seen.logit_bias().at(5), -1.5f);
  EXPECT_EQ(seen.stop_size(), 2);
  EXPECT_EQ(seen.cache().reuse(), v1::CacheOptions::CARRY);
  EXPECT_FALSE(seen.cache().store());
  EXPECT_TRUE(seen.cache().has_store());
}

TEST_F(CommandTest, NothingIsSentThatWasNotAsked) {
  v1::CompleteRequest seen;
  server_.bend = [&](const v1::CompleteRequest& request, v1::CompleteEvent*) {
    seen = request;
    return true;
  };
  ASSERT_EQ(Run(RunComplete, {"--prompt=x", "--stream"}), kExitOk);
  EXPECT_FALSE(seen.has_temperature() || seen.has_max_tokens() || seen.has_seed() || seen.has_n() ||
               seen.has_ignore_eos() || seen.cache().has_store());
}

TEST_F(CommandTest, WrongUseSendsNothing) {
  for (std::vector<std::string> arguments : {std::vector<std::string>{},
                                             {"--prompt=a", "--tokens=1"},
                                             {"--prompt=a\xff"},
                                             {"--prompt=a", "--reuse=maybe"},
                                             {"--prompt=a", "--logit-bias=5"},
                                             {"--prompt=a", "--timeout=0"},
                                             {"--prompt=a", "extra"},
                                             {"--prompt-file=/no/such/file"}}) {
    EXPECT_EQ(Run(RunComplete, arguments), kExitUsage);
    EXPECT_THAT(err_, HasSubstr("Try 'carryover complete --help'"));
  }
  EXPECT_EQ(server_.started, 0);
}

TEST_F(CommandTest, ErrorsShowTheirDetails) {
  google::rpc::BadRequest bad;
  auto* violation = bad.add_field_violations();
  violation->set_field("stop[2]");
  violation->set_description("is empty");
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500000000);
  server_.status = [&](const v1::CompleteRequest&) {
    return WithDetails(grpc::StatusCode::INVALID_ARGUMENT, "stop[2] is empty", {&bad, &retry});
  };
  EXPECT_EQ(Run(RunComplete, {"--prompt=x"}), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("INVALID_ARGUMENT: stop[2] is empty"));
  EXPECT_THAT(err_, HasSubstr("stop[2]: is empty"));
  EXPECT_THAT(err_, HasSubstr("try again in 1.5 s"));
  EXPECT_EQ(Run(RunComplete, {"--prompt=x", "--json"}), kExitFailed);
  EXPECT_EQ(OutJson()["error"]["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(OutJson()["error"]["field_violations"][0]["field"], "stop[2]");
  EXPECT_EQ(OutJson()["error"]["retry_after_s"], 1.5);
}

TEST_F(CommandTest, LoadShowsProgressAndPreconditions) {
  v1::LoadRequest seen;
  server_.versions.load = [&](const v1::LoadRequest& request,
                              grpc::ServerWriter<v1::LoadEvent>* writer) {
    seen = request;
    v1::LoadEvent event;
    event.set_progress(0.5);
    writer->Write(event);
    event.mutable_version()->set_model("m");
    event.mutable_version()->set_version("v2");
    writer->Write(event);
    return grpc::Status::OK;
  };
  ASSERT_EQ(Run(RunLoad, {"--model=m", "--version=v2", "--path=some/folder", "--carry-from=v0,v1",
                          "--promote=0", "--kv-dtype=fp32"}),
            kExitOk)
      << err_;
  EXPECT_THAT(err_, HasSubstr("loading m v2:  50 %"));
  EXPECT_THAT(out_, HasSubstr("loaded m v2"));
  EXPECT_EQ(seen.carry_from_size(), 2);
  EXPECT_TRUE(seen.has_promote());
  EXPECT_EQ(seen.kv_dtype(), v1::DTYPE_FP32);
  EXPECT_EQ(seen.path()[0], '/');

  google::rpc::PreconditionFailure failure;
  failure.add_violations()->set_description("layers: 30 and 12");
  server_.versions.load = [&](const v1::LoadRequest&, grpc::ServerWriter<v1::LoadEvent>*) {
    return WithDetails(grpc::StatusCode::FAILED_PRECONDITION, "not compatible", {&failure});
  };
  EXPECT_EQ(Run(RunLoad, {"--model=m", "--version=v2", "--path=/x"}), kExitFailed);
  EXPECT_THAT(err_, HasSubstr("layers: 30 and 12"));
}

TEST_F(CommandTest, TheOnlyModelNeedsNoName) {
  server_.versions.list.add_versions()->set_model("only");
  ASSERT_EQ(Run(RunPromote, {"--version=v2", "--share=5"}), kExitOk) << err_;
  EXPECT_EQ(server_.versions.promoted.model(), "only");
  EXPECT_EQ(server_.versions.promoted.share(), 5);
  server_.versions.list.add_versions()->set_model("other");
  EXPECT_EQ(Run(RunPromote, {"--version=v2"}), kExitUsage);
  EXPECT_THAT(err_, HasSubstr("only, other"));
}

TEST_F(CommandTest, EvictAsksWhat) {
  EXPECT_EQ(Run(RunCache, {"evict"}), kExitUsage);
  EXPECT_EQ(Run(RunCache, {"evict", "--all", "--prompt=x"}), kExitUsage);
  EXPECT_EQ(Run(RunCache, {"evict", "--all", "--version=v"}), kExitUsage);
  ASSERT_EQ(Run(RunCache, {"evict", "--version=v1"}), kExitOk);
  EXPECT_EQ(server_.cache.evicted.scope().version(), "v1");
  ASSERT_EQ(Run(RunCache, {"evict", "--prompt=x", "--salt=s"}), kExitOk);
  EXPECT_EQ(server_.cache.evicted.prefix().salt(), "s");
  ASSERT_EQ(Run(RunCache, {"evict", "--all"}), kExitOk);
  EXPECT_TRUE(server_.cache.evicted.has_scope());
  EXPECT_THAT(out_, HasSubstr("3 blocks evicted"));
}

TEST_F(CommandTest, UnpinIsPinWithFalse) {
  ASSERT_EQ(Run(RunCache, {"unpin", "--tokens=1,2"}), kExitOk);
  EXPECT_TRUE(server_.cache.pinned.has_pinned());
  EXPECT_FALSE(server_.cache.pinned.pinned());
  ASSERT_EQ(Run(RunCache, {"pin", "--tokens=1,2"}), kExitOk);
  EXPECT_TRUE(server_.cache.pinned.pinned());
}

TEST_F(CommandTest, InterruptCancelsTheCall) {
  server_.versions.load = [&](const v1::LoadRequest&, grpc::ServerWriter<v1::LoadEvent>*) {
    interrupt_.Trigger();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return grpc::Status::OK;
  };
  EXPECT_EQ(Run(RunLoad, {"--model=m", "--version=v2", "--path=/x"}), kExitInterrupted);
  EXPECT_THAT(err_, HasSubstr("interrupted"));
}

// Whoever answers nothing at all must not hold a Ctrl-C up.
TEST_F(CommandTest, InterruptEndsTheWaitForAConnection) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 16), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  server_.address = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const auto start = std::chrono::steady_clock::now();
  std::thread user([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    interrupt_.Trigger();
  });
  EXPECT_EQ(Run(RunComplete, {"--prompt=x"}), kExitInterrupted);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  user.join();
  close(listener);
}

TEST_F(CommandTest, UnknownCommandsAreNamed) {
  EXPECT_EQ(Run(RunCache, {"evct"}), kExitUsage);
  EXPECT_THAT(err_, HasSubstr("unknown command 'evct'; did you mean 'evict'?"));
}

TEST_F(CommandTest, BenchDrives256StreamsAndLosesNone) {
  ASSERT_EQ(Run(RunBench,
                {"--concurrency=256", "--requests=600", "--prefixes=4", "--prefix-tokens=16",
                 "--suffix-tokens=4", "--output-tokens=3", "--warmup=4", "--recheck=20", "--json"}),
            kExitOk)
      << err_ << out_;
  const Json json = OutJson();
  EXPECT_EQ(json["completed"], 600);
  EXPECT_EQ(json["failed"], 0);
  EXPECT_EQ(json["max_concurrent_requests"], 256);
  EXPECT_EQ(json["total_input_tokens"], 600 * 20);
  EXPECT_EQ(json["total_output_tokens"], 600 * 3);
  EXPECT_EQ(json["rechecked"], 20);
  EXPECT_EQ(json["recheck_differing"], 0);
  EXPECT_EQ(json["versions"]["v1"], 600);
  EXPECT_GT(json["median_ttft_ms"].get<double>(), 0);
  EXPECT_EQ(server_.started, 604);
}

TEST_F(CommandTest, BenchAsksForTheVocabulary) {
  int32_t highest = 0;
  std::mutex mutex;
  server_.bend = [&](const v1::CompleteRequest& request, v1::CompleteEvent*) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int32_t id : request.tokens().ids()) highest = std::max(highest, id);
    return true;
  };
  ASSERT_EQ(Run(RunBench, {"--requests=20", "--suffix-tokens=2000", "--output-tokens=1"}), kExitOk);
  EXPECT_LT(highest, FakeServer::kVocabulary);
  EXPECT_GT(highest, FakeServer::kVocabulary - 10);
}

TEST_F(CommandTest, BenchAsksForNothingToBeStored) {
  std::atomic<int> stored = 0;
  server_.bend = [&](const v1::CompleteRequest& request, v1::CompleteEvent* event) {
    if (event->has_started() && request.cache().store()) ++stored;
    return true;
  };
  ASSERT_EQ(Run(RunBench, {"--requests=3", "--vocabulary=99", "--store=false"}), kExitOk);
  EXPECT_EQ(stored, 0);
  ASSERT_EQ(Run(RunBench, {"--requests=3", "--vocabulary=99"}), kExitOk);
  EXPECT_EQ(stored, 3);
}

TEST_F(CommandTest, BenchSeesWhatIsWrongWithAStream) {
  using Bend = std::function<bool(const v1::CompleteRequest&, v1::CompleteEvent*)>;
  const std::vector<std::pair<const char*, Bend>> faults = {
      {"another stream's id",
       [](const v1::CompleteRequest&, v1::CompleteEvent* event) {
         if (event->has_started()) event->mutable_started()->set_request_id("bench-0-9");
         return true;
       }},
      {"a lost token",
       [](const v1::CompleteRequest& request, v1::CompleteEvent* event) {
         return !event->has_delta() || event->delta().token_ids(0) != FakeServer::Token(request, 1);
       }},
      {"no done",
       [](const v1::CompleteRequest&, v1::CompleteEvent* event) { return !event->has_done(); }},
      {"no finish",
       [](const v1::CompleteRequest&, v1::CompleteEvent* event) { return !event->has_finished(); }},
      {"another prompt's length",
       [](const v1::CompleteRequest&, v1::CompleteEvent* event) {
         if (event->has_done()) {
           v1::Usage* usage = event->mutable_done()->mutable_usage();
           usage->set_prompt_tokens(usage->prompt_tokens() + 1);
           usage->set_computed_tokens(usage->computed_tokens() + 1);
         }
         return true;
       }},
      {"parts that do not add up",
       [](const v1::CompleteRequest&, v1::CompleteEvent* event) {
         if (event->has_done()) event->mutable_done()->mutable_usage()->set_carried_tokens(1);
         return true;
       }},
      {"a delta of a choice that was not asked for",
       [](const v1::CompleteRequest&, v1::CompleteEvent* event) {
         if (event->has_delta()) event->mutable_delta()->set_index(1);
         return true;
       }},
  };
  for (const auto& [name, bend] : faults) {
    // Only one request in ten goes wrong.
    server_.bend = [&bend = bend](const v1::CompleteRequest& request, v1::CompleteEvent* event) {
      return request.request_id() != "bench-0-7" || bend(request, event);
    };
    EXPECT_EQ(Run(RunBench, {"--requests=10", "--concurrency=10", "--vocabulary=5000", "--json"}),
              kExitFailed)
        << name;
    EXPECT_EQ(OutJson()["broken_streams"], 1) << name << out_;
    EXPECT_EQ(OutJson()["completed"], 9) << name;
  }
}

TEST_F(CommandTest, BenchCountsRefusals) {
  server_.status = [](const v1::CompleteRequest& request) {
    return request.request_id() == "bench-3-1"
               ? grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full")
               : grpc::Status::OK;
  };
  EXPECT_EQ(Run(RunBench, {"--requests=4", "--seed=3", "--json"}), kExitFailed);
  EXPECT_EQ(OutJson()["errors"]["RESOURCE_EXHAUSTED"], 1);
  EXPECT_EQ(OutJson()["first_error_messages"]["RESOURCE_EXHAUSTED"], "queue full");
  EXPECT_EQ(OutJson()["broken_streams"], 0);
}

TEST_F(CommandTest, OpenLoopKeepsItsRate) {
  ASSERT_EQ(Run(RunBench,
                {"--rate=200", "--requests=60", "--output-tokens=1", "--vocabulary=99", "--json"}),
            kExitOk);
  // 59 gaps of 5 ms on average, by this seed; sending at once would take a few milliseconds.
  EXPECT_GT(OutJson()["duration"].get<double>(), 0.15);
  EXPECT_EQ(OutJson()["request_rate"], 200);
}

TEST_F(CommandTest, BenchReadsTextAndWritesItsReport) {
  const std::string text = testing::TempDir() + "/bench_text";
  const std::string report = testing::TempDir() + "/bench_report.json";
  const std::string records = testing::TempDir() + "/bench_records.jsonl";
  std::ofstream(text) << std::string(500, 'x') << "é";
  ASSERT_EQ(Run(RunBench, {"--text=" + text, "--prefix-tokens=100", "--prefixes=5", "--requests=3",
                           "--out=" + report, "--records=" + records, "--goodput-ttft-ms=100000"}),
            kExitOk)
      << err_;
  std::ifstream file(report);
  const Json json = Json::parse(file, nullptr, false);
  EXPECT_EQ(json["completed"], 3);
  EXPECT_GT(json["request_goodput"].get<double>(), 0);
  EXPECT_THAT(out_, HasSubstr("time to first token"));
  std::ifstream lines(records);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const Json record = Json::parse(line, nullptr, false);
    EXPECT_EQ(record["code"], "OK");
    EXPECT_EQ(record["itl_ms"].size(), 15u) << line;  // 16 tokens
    EXPECT_GT(record["ttft_ms"].get<double>(), 0);
    EXPECT_GE(record["e2el_ms"].get<double>(), record["ttft_ms"].get<double>());
  }
  EXPECT_EQ(count, 3);
  EXPECT_EQ(Run(RunBench, {"--text=" + text, "--prefix-tokens=1000"}), kExitUsage);
  EXPECT_THAT(err_, HasSubstr("the text has 502 tokens"));
}

TEST_F(CommandTest, InterruptEndsABench) {
  server_.bend = [&](const v1::CompleteRequest& request, v1::CompleteEvent*) {
    if (request.request_id() == "bench-0-20") interrupt_.Trigger();
    return true;
  };
  EXPECT_EQ(Run(RunBench, {"--requests=100000", "--concurrency=8", "--vocabulary=99", "--json"}),
            kExitInterrupted);
  EXPECT_LT(OutJson()["num_prompts"].get<int>(), 1000);
}

}  // namespace
}  // namespace carryover
