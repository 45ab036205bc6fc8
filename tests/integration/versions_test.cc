// Versions while serving, and what one may read of another's caches. Behaviours 1, 2, 4 and 11 of
// the carrying part; the control: equal weights under another fingerprint.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/rpc/status_details.pb.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

class VersionsTest : public testing::Test {
 protected:
  void Start(const std::string& config) {
    // Nothing by chance and nothing in the background: fidelity_test.cc looks at that.
    server_ = ServerProcess::Start(config +
                                   "engine { kv_cache_bytes: 134217728 }"
                                   "fidelity { hold_out_rate: 0 sample_rate: 0 "
                                   "learning_sample_rate: 0 }");
    ASSERT_NE(server_, nullptr);
    stub_ = server_->NewStub();
  }
  void StartDemo(const std::string& more = "") {
    Start(LoadEntry("demo", "S", DemoModel("2026-10")) + more);
  }
  v1::LoadRequest LoadOf(const std::string& version, const std::string& path,
                         const std::vector<std::string>& carry_from = {},
                         const std::string& distinct = "") {
    v1::LoadRequest request;
    request.set_model("demo");
    request.set_version(version);
    request.set_path(path);
    request.set_distinct(distinct);
    request.set_weights(v1::DTYPE_FP32);
    request.set_kv_dtype(v1::DTYPE_FP32);
    for (const std::string& source : carry_from) request.add_carry_from(source);
    return request;
  }
  void LoadOk(const v1::LoadRequest& request) {
    v1::Version loaded;
    const grpc::Status status = Load(*server_, request, &loaded);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(loaded.version(), request.version());
    EXPECT_EQ(loaded.state(), "ready");
  }
  v1::CompleteResponse Ask(const std::string& version, int prefix, int seed,
                           v1::CacheOptions::Reuse reuse = v1::CacheOptions::CARRY,
                           int max_tokens = 12) {
    v1::CompleteRequest request = Tokens(SomeTokens(prefix, seed), max_tokens);
    request.set_version(version);
    request.mutable_cache()->set_reuse(reuse);
    const v1::CompleteResponse response = Complete(*stub_, request);
    ExpectConsistent(response.usage());
    if (!version.empty()) {
      EXPECT_EQ(response.version(), version);
    }
    return response;
  }
  grpc::Status Promote(const std::string& version, double share = 100) {
    v1::PromoteRequest request;
    request.set_model("demo");
    request.set_version(version);
    request.set_share(share);
    grpc::ClientContext context;
    v1::PromoteResponse response;
    return server_->versions().Promote(&context, request, &response);
  }
  grpc::Status Unload(const std::string& version) {
    v1::UnloadRequest request;
    request.set_model("demo");
    request.set_version(version);
    grpc::ClientContext context;
    v1::UnloadResponse response;
    const grpc::Status status = server_->versions().Unload(&context, request, &response);
    if (status.ok()) {
      EXPECT_EQ(response.version().state(), "unloaded");
    }
    return status;
  }
  grpc::Status Remove(const std::string& version) {
    v1::RemoveRequest request;
    request.set_model("demo");
    request.set_version(version);
    grpc::ClientContext context;
    v1::RemoveResponse response;
    return server_->versions().Remove(&context, request, &response);
  }
  v1::EvictResponse Evict() {
    v1::EvictRequest request;
    request.mutable_scope();
    grpc::ClientContext context;
    v1::EvictResponse response;
    EXPECT_TRUE(server_->cache().Evict(&context, request, &response).ok());
    return response;
  }
  void ExpectStoreIsRight() {
    grpc::ClientContext context;
    v1::CheckResponse response;
    const grpc::Status status = server_->cache().Check(&context, {}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(server_->Metric("carryover_provenance_violations_total"), 0);
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::Completions::Stub> stub_;
};

// T is S byte for byte but for its fingerprint: its blocks really are carried, and the answers are
// those of a native run. Without `distinct` the same is a plain native hit.
TEST_F(VersionsTest, ControlCarriesAndAnswersTheSame) {
  StartDemo();
  LoadOk(LoadOf("T", DemoModel("2026-10"), {"S"}, "control"));
  LoadOk(LoadOf("same", DemoModel("2026-10"), {"S"}));
  for (const int length : {1, 2, 15, 16, 17, 31, 32, 33, 200, 1000}) {
    SCOPED_TRACE(length);
    const v1::CompleteResponse by_s = Ask("S", length, length);
    const int full = (length - 1) / 16 * 16;
    const v1::CompleteResponse carried = Ask("T", length, length);
    // Less than min_carried_tokens would not be worth it; 16 are.
    EXPECT_EQ(carried.usage().carried_tokens(), full);
    EXPECT_EQ(carried.usage().cached_tokens(), 0);
    EXPECT_EQ(carried.choices(0).text(), by_s.choices(0).text());
    const v1::CompleteResponse same = Ask("same", length, length);
    EXPECT_EQ(same.usage().carried_tokens(), 0);
    EXPECT_EQ(same.usage().cached_tokens(), full);
    EXPECT_EQ(same.choices(0).text(), by_s.choices(0).text());
    if (full > 0) {
      EXPECT_EQ(carried.cache().segments(0).source(), "S");
      EXPECT_EQ(carried.cache().segments(0).plan(), "direct");
      EXPECT_EQ(carried.cache().segments(0).tokens(), full);
    }
    // Never against the request's wish, and AUTO does as the configuration says: natively.
    EXPECT_EQ(Ask("T", length, length, v1::CacheOptions::NATIVE_ONLY).usage().carried_tokens(), 0);
  }
  const v1::CompleteResponse seen = Ask("S", 300, 7);
  EXPECT_EQ(Ask("T", 300, 7, v1::CacheOptions::AUTO).usage().carried_tokens(), 0);
  ExpectStoreIsRight();
}

// Logits of carried and native runs, not only their best token.
TEST_F(VersionsTest, ControlLogprobsAreEqual) {
  StartDemo("cache { when_learning: CARRY }");
  LoadOk(LoadOf("T", DemoModel("2026-10"), {"S"}, "control"));
  v1::CompleteRequest request = Tokens(SomeTokens(500, 3), 16);
  request.set_logprobs(10);
  request.set_version("S");
  const v1::CompleteResponse native = Complete(*stub_, request);
  request.set_version("T");
  const v1::CompleteResponse carried = Complete(*stub_, request);
  EXPECT_EQ(carried.usage().carried_tokens(), 496)
      << "AUTO carries where the configuration says so";
  ASSERT_EQ(carried.choices(0).logprobs_size(), native.choices(0).logprobs_size());
  for (int i = 0; i < carried.choices(0).logprobs_size(); ++i) {
    const auto& a = native.choices(0).logprobs(i);
    const auto& b = carried.choices(0).logprobs(i);
    ASSERT_EQ(a.top_size(), b.top_size());
    for (int k = 0; k < a.top_size(); ++k) {
      EXPECT_EQ(a.top(k).token(), b.top(k).token());
      EXPECT_NEAR(a.top(k).logprob(), b.top(k).logprob(), 1e-5);
    }
  }
}

// Behaviours 1 and 2: swap, warm, evict, cold, warm. Every answer says what it read of whom, and
// what T computed over blocks of S never turns native.
TEST_F(VersionsTest, SwappedWeightsAreNeverAnOrdinaryHit) {
  StartDemo("cache { when_learning: CARRY }");
  EXPECT_EQ(Ask("", 200, 1).usage().cached_tokens(), 0);
  EXPECT_EQ(Ask("", 200, 1).usage().cached_tokens(), 192);
  LoadOk(LoadOf("T", DemoModel("2026-11"), {"S"}));
  ASSERT_TRUE(Promote("T").ok());

  const v1::CompleteResponse stale = Ask("", 200, 1);
  EXPECT_EQ(stale.version(), "T");
  EXPECT_EQ(stale.usage().cached_tokens(), 0) << "not an ordinary hit";
  EXPECT_EQ(stale.usage().carried_tokens(), 192);
  // The next turn: what T computed over S may be read again, and is told as carried.
  std::vector<int32_t> turn = SomeTokens(200, 1);
  for (const int32_t token : stale.choices(0).token_ids()) turn.push_back(token);
  for (const int32_t token : SomeTokens(60, 99)) turn.push_back(token);
  for (int round = 0; round < 3; ++round) {
    v1::CompleteRequest request = Tokens(turn, 4);
    request.set_version("T");
    request.mutable_cache()->set_reuse(v1::CacheOptions::CARRY);
    const v1::CompleteResponse next = Complete(*stub_, request);
    ExpectConsistent(next.usage());
    EXPECT_EQ(next.usage().cached_tokens(), 0) << next.cache().ShortDebugString();
    EXPECT_GE(next.usage().carried_tokens(), 192);
    for (const v1::CacheSegment& segment : next.cache().segments()) {
      if (segment.source() == "T") {
        EXPECT_EQ(segment.plan(), "fresh");
      }
    }
    request.mutable_cache()->set_reuse(v1::CacheOptions::NATIVE_ONLY);
    request.mutable_cache()->set_store(false);
    EXPECT_EQ(Complete(*stub_, request).usage().cached_tokens(), 0) << "tainted blocks as native";
  }
  ExpectStoreIsRight();

  const std::string native = Ask("T", 200, 1, v1::CacheOptions::NATIVE_ONLY).choices(0).text();
  Evict();
  const v1::CompleteResponse cold = Ask("T", 200, 1);
  EXPECT_EQ(cold.usage().computed_tokens(), 200);
  EXPECT_EQ(cold.choices(0).text(), native);
  const v1::CompleteResponse warm = Ask("T", 200, 1);
  EXPECT_EQ(warm.usage().cached_tokens(), 192);
  EXPECT_EQ(warm.choices(0).text(), native);
  EXPECT_EQ(warm.cache().segments(0).source(), "T");
  ExpectStoreIsRight();
}

// Behaviour 4: after a flush nothing is reported as cached; one while a request runs tells what
// it could not take.
TEST_F(VersionsTest, FlushIsHonest) {
  StartDemo();
  Ask("S", 400, 1);
  EXPECT_EQ(Ask("S", 400, 1).usage().cached_tokens(), 384);
  v1::EvictResponse evicted = Evict();
  EXPECT_GE(evicted.blocks_evicted(), 24);
  EXPECT_EQ(evicted.blocks_in_use(), 0);
  EXPECT_EQ(Ask("S", 400, 1).usage().cached_tokens(), 0);

  v1::CompleteRequest running = Tokens(SomeTokens(400, 1), 3000);
  running.set_ignore_eos(true);
  grpc::ClientContext context;
  auto reader = stub_->CompleteStream(&context, running);
  v1::CompleteEvent event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(event.started().usage().cached_tokens(), 384);
  evicted = Evict();
  EXPECT_GE(evicted.blocks_in_use(), 24) << evicted.ShortDebugString();
  context.TryCancel();
  while (reader->Read(&event)) {
  }
  (void)reader->Finish();
  EXPECT_EQ(server_->WaitIdle(), "");
  Evict();
  EXPECT_EQ(Ask("S", 400, 1).usage().cached_tokens(), 0);

  // What is pinned stays.
  v1::PinRequest pin;
  pin.mutable_prefix()->set_model("demo");
  const std::vector<int32_t> tokens = SomeTokens(400, 1);
  pin.mutable_prefix()->mutable_tokens()->mutable_ids()->Add(tokens.begin(), tokens.end());
  grpc::ClientContext pin_context;
  v1::PinResponse pinned;
  ASSERT_TRUE(server_->cache().Pin(&pin_context, pin, &pinned).ok());
  EXPECT_EQ(pinned.tokens(), 400);
  EXPECT_GE(Evict().blocks_pinned(), 24);
  EXPECT_EQ(Ask("S", 400, 1).usage().cached_tokens(), 384);
}

TEST_F(VersionsTest, IncompatibleIsRefusedWithEveryField) {
  StartDemo();
  v1::Version loaded;
  const grpc::Status status = Load(*server_, LoadOf("other", TinyModel("qwen3"), {"S"}), &loaded);
  ASSERT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(details.details(0).UnpackTo(&failure));
  std::string fields;
  for (const auto& violation : failure.violations()) fields += violation.subject() + " ";
  for (const char* field :
       {"architecture ", "layers ", "head_dim ", "qk_norm ", "tokenizer_sha256 "}) {
    EXPECT_NE(fields.find(field), std::string::npos) << field << "in " << fields;
  }
  // It left nothing behind, and loads where it claims no source.
  grpc::ClientContext context;
  v1::ListVersionsResponse list;
  ASSERT_TRUE(server_->versions().List(&context, {}, &list).ok());
  EXPECT_EQ(list.versions_size(), 1);
  LoadOk(LoadOf("other", TinyModel("qwen3")));

  EXPECT_EQ(Load(*server_, LoadOf("S", DemoModel("2026-10")), &loaded).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Load(*server_, LoadOf("x", "/no/such/folder"), &loaded).error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Load(*server_, LoadOf("x", DemoModel("2026-11"), {"nobody"}), &loaded).error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Load(*server_, LoadOf("a b", DemoModel("2026-11")), &loaded).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

// The weights of S go, its caches serve on; rollback; a chain of three; removal.
TEST_F(VersionsTest, LifeOfVersions) {
  StartDemo("cache { when_learning: CARRY }");
  Ask("S", 320, 1);
  LoadOk(LoadOf("T", DemoModel("2026-11"), {"S"}));
  EXPECT_EQ(Unload("S").error_code(), grpc::StatusCode::FAILED_PRECONDITION) << "it serves";
  ASSERT_TRUE(Promote("T").ok());
  ASSERT_TRUE(Unload("S").ok());
  EXPECT_EQ(Ask("", 320, 1).usage().carried_tokens(), 304) << "of an unloaded version";
  v1::CompleteRequest to_unloaded = Tokens(SomeTokens(10, 1), 1);
  to_unloaded.set_version("S");
  grpc::ClientContext context;
  v1::CompleteResponse response;
  EXPECT_EQ(stub_->Complete(&context, to_unloaded, &response).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);

  // Rollback: S comes back under another name, declared to read T; its own blocks are native.
  Ask("T", 320, 2, v1::CacheOptions::NATIVE_ONLY);
  LoadOk(LoadOf("S-again", DemoModel("2026-10"), {"T"}));
  ASSERT_TRUE(Promote("S-again").ok());
  EXPECT_EQ(Ask("", 320, 1).usage().cached_tokens(), 304) << "equal provenance, whatever the name";
  EXPECT_EQ(Ask("", 320, 2).usage().carried_tokens(), 304);

  // A chain: the next one reads the caches of both.
  LoadOk(LoadOf("U", DemoModel("2026-11"), {"S", "T"}, "third"));
  EXPECT_EQ(Ask("U", 320, 1).usage().carried_tokens(), 304);
  EXPECT_EQ(Ask("U", 320, 2).usage().carried_tokens(), 304);
  ExpectStoreIsRight();

  // Removal takes the caches too, once no version of equal weights is left.
  ASSERT_TRUE(Remove("U").ok());
  ASSERT_TRUE(Remove("T").ok());
  EXPECT_EQ(Ask("S-again", 320, 2).usage().carried_tokens(), 0);
  EXPECT_EQ(Remove("nobody").error_code(), grpc::StatusCode::NOT_FOUND);
  ExpectStoreIsRight();
}

// Versions come and go under load; no request is lost and each is answered by one whole version.
TEST_F(VersionsTest, ChangesWhileServing) {
  StartDemo("cache { when_learning: CARRY }");
  const auto answers = [&](const std::string& version) {
    std::vector<std::string> texts;
    for (int i = 0; i < 6; ++i) {
      texts.push_back(
          Ask(version, 40 + 10 * i, i, v1::CacheOptions::NATIVE_ONLY).choices(0).text());
    }
    return texts;
  };
  const std::vector<std::string> of_s = answers("S");
  std::atomic<bool> stop{false};
  std::atomic<int> by_s{0}, by_t{0};
  LoadOk(LoadOf("T", DemoModel("2026-11"), {"S"}));
  const std::vector<std::string> of_t = answers("T");
  ASSERT_TRUE(Remove("T").ok());
  std::vector<std::thread> clients;
  for (int c = 0; c < 3; ++c) {
    clients.emplace_back([&, c] {
      const auto stub = server_->NewStub();
      for (int round = c; !stop; ++round) {
        const int i = round % 6;
        v1::CompleteRequest request = Tokens(SomeTokens(40 + 10 * i, i), 12);
        request.mutable_cache()->set_reuse(v1::CacheOptions::NATIVE_ONLY);
        request.set_session(absl::StrCat("session", round % 50));
        const v1::CompleteResponse response = Complete(*stub, request);
        if (response.version() == "S") {
          ++by_s;
          EXPECT_EQ(response.choices(0).text(), of_s[i]);
        } else {
          ++by_t;
          EXPECT_EQ(response.version(), "T");
          EXPECT_EQ(response.choices(0).text(), of_t[i]);
        }
      }
    });
  }
  for (int round = 0; round < 3; ++round) {
    LoadOk(LoadOf("T", DemoModel("2026-11"), {"S"}));
    EXPECT_TRUE(Promote("T", 30).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(Promote("T").ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(Promote("S").ok());
    EXPECT_TRUE(Unload("T").ok());
    EXPECT_TRUE(Remove("T").ok());
  }
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(by_s, 10);
  EXPECT_GT(by_t, 10);
  EXPECT_EQ(server_->WaitIdle(), "");
  ExpectStoreIsRight();
}

// A share of the traffic, by session and nothing else.
TEST_F(VersionsTest, ShareFollowsTheSession) {
  StartDemo();
  LoadOk(LoadOf("T", DemoModel("2026-11")));
  ASSERT_TRUE(Promote("T", 25).ok());
  EXPECT_EQ(Promote("T", 101).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Promote("T", std::numeric_limits<double>::quiet_NaN()).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  int by_t = 0;
  for (int i = 0; i < 200; ++i) {
    v1::CompleteRequest request = Tokens(SomeTokens(4, i), 1);
    request.set_session(absl::StrCat("user ", i));
    const std::string first = Complete(*stub_, request).version();
    by_t += first == "T" ? 1 : 0;
    if (i % 10 == 0) {
      EXPECT_EQ(Complete(*stub_, request).version(), first);
    }
  }
  EXPECT_GT(by_t, 25);
  EXPECT_LT(by_t, 80);
}

TEST_F(VersionsTest, WarmAheadOfAnUpdate) {
  StartDemo("cache { when_learning: CARRY }");
  const std::vector<int32_t> tokens = SomeTokens(500, 5);
  v1::WarmRequest warm;
  warm.mutable_prefix()->set_model("demo");
  warm.mutable_prefix()->mutable_tokens()->mutable_ids()->Add(tokens.begin(), tokens.end());
  for (const bool again : {false, true}) {
    grpc::ClientContext context;
    auto reader = server_->cache().Warm(&context, warm);
    v1::WarmEvent event;
    v1::WarmResult result;
    while (reader->Read(&event)) {
      if (event.has_result()) result = event.result();
    }
    const grpc::Status status = reader->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(result.version(), "S");
    EXPECT_EQ(result.tokens(), 500);
    EXPECT_EQ(result.stored_tokens(), 496);
    EXPECT_EQ(result.cached_tokens(), again ? 496 : 0);
  }
  LoadOk(LoadOf("T", DemoModel("2026-11"), {"S"}));
  EXPECT_EQ(Ask("T", 500, 5).usage().carried_tokens(), 496);

  grpc::ClientContext list_context;
  v1::ListCacheResponse list;
  ASSERT_TRUE(server_->cache().List(&list_context, {}, &list).ok());
  ASSERT_GE(list.prefixes_size(), 1);
  EXPECT_GE(list.prefixes(0).tokens(), 496);
  grpc::ClientContext stats_context;
  v1::StatsResponse stats;
  ASSERT_TRUE(server_->cache().Stats(&stats_context, {}, &stats).ok());
  EXPECT_GE(stats.store_size(), 1);
  EXPECT_EQ(stats.device_blocks_active(), 0);
}

}  // namespace
}  // namespace carryover
