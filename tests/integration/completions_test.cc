// Completions over a real server and a tiny model in fp32, where equal requests give equal answers.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/utf8.h"
#include "tests/integration/server_process.h"

namespace carryover {
namespace {

class CompletionsTest : public testing::Test {
 protected:
  void Start(const std::string& config = "engine { kv_cache_bytes: 16777216 }") {
    server_ = ServerProcess::Start(LoadEntry("tiny", "v1", TinyModel("llama3")) + config);
    ASSERT_NE(server_, nullptr);
    stub_ = server_->NewStub();
  }
  v1::CompleteResponse Complete(const v1::CompleteRequest& request) {
    return carryover::Complete(*stub_, request);
  }
  Streamed Stream(const v1::CompleteRequest& request) { return carryover::Stream(*stub_, request); }
  // Greedy text without stops; random weights give all kinds of bytes.
  std::string LongText(const std::string& prompt, int tokens) {
    v1::CompleteRequest request = Prompt(prompt, tokens);
    request.set_ignore_eos(true);
    return Complete(request).choices(0).text();
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::Completions::Stub> stub_;
};

// Behaviours 10 and 12, and text that is always UTF-8.
TEST_F(CompletionsTest, StreamEqualsUnary) {
  Start();
  for (int seed = 0; seed < 12; ++seed) {
    v1::CompleteRequest request = Tokens(SomeTokens(5 + seed * 7, seed), 60);
    request.set_ignore_eos(true);
    request.set_temperature(seed % 3 == 0 ? 0 : 1.5f);
    request.set_seed(static_cast<uint64_t>(seed));
    request.set_n(1 + seed % 3);
    request.set_echo(seed % 4 == 1);
    const v1::CompleteResponse unary = Complete(request);
    const Streamed stream = Stream(request);
    ASSERT_TRUE(stream.status.ok()) << stream.status.error_message();
    ASSERT_EQ(unary.choices_size(), request.n());
    for (const v1::Choice& choice : unary.choices()) {
      EXPECT_EQ(choice.text(), stream.text.at(choice.index())) << seed;
      EXPECT_EQ(choice.token_ids_size(), 60 + (request.echo() ? request.tokens().ids_size() : 0));
      EXPECT_EQ(choice.finish().reason(), stream.finish.at(choice.index()).reason());
      for (const std::string& delta : stream.deltas.at(choice.index())) {
        EXPECT_EQ(FirstInvalidUtf8(delta), delta.size());
      }
    }
    EXPECT_EQ(stream.order.front(), 's');
    EXPECT_EQ(stream.order.back(), 'e');
    EXPECT_GT(stream.deltas.at(0).size(), 5u) << "it is a stream";
    ExpectConsistent(unary.usage());
    ExpectConsistent(stream.done.usage());
    ExpectConsistent(stream.started.usage());
    EXPECT_EQ(unary.usage().completion_tokens(), 60 * request.n());
    EXPECT_EQ(stream.started.usage().completion_tokens(), 0);
  }
  EXPECT_EQ(server_->WaitIdle(), "");
}

// Behaviour 10: whatever the stop string is and wherever it falls, nothing of it is sent, nothing
// is sent twice, and the joined deltas are the text before it.
TEST_F(CompletionsTest, StopStringsNeverLeak) {
  Start();
  const std::string text = LongText("stop here", 120);
  ASSERT_GT(text.size(), 60u);
  int stopped = 0;
  for (size_t begin = 3; begin + 8 < text.size() && stopped < 25; begin += 5) {
    for (const size_t length : {1, 2, 5}) {
      const std::string stop = text.substr(begin, length);
      if (FirstInvalidUtf8(stop) != stop.size()) continue;
      v1::CompleteRequest request = Prompt("stop here", 120);
      request.set_ignore_eos(true);
      request.add_stop(stop + "\x01never");  // shares a start with the real one
      request.add_stop(stop);
      const Streamed stream = Stream(request);
      const std::string expected = text.substr(0, text.find(stop));
      EXPECT_EQ(stream.text.count(0) > 0 ? stream.text.at(0) : "", expected);
      EXPECT_EQ(stream.finish.at(0).reason(), v1::Finish::STOP_STRING);
      EXPECT_EQ(stream.finish.at(0).stop(), stop);
      request.set_include_stop(true);
      const v1::CompleteResponse unary = Complete(request);
      EXPECT_EQ(unary.choices(0).text(), expected + stop);
      ++stopped;
    }
  }
  EXPECT_GT(stopped, 10);

  // A stop that never comes holds nothing back at the end.
  v1::CompleteRequest request = Prompt("stop here", 120);
  request.set_ignore_eos(true);
  request.add_stop(text.substr(text.size() - 1) + "\x01\x02");
  if (FirstInvalidUtf8(request.stop(0)) == request.stop(0).size()) {
    EXPECT_EQ(Stream(request).text.at(0), text);
  }
}

TEST_F(CompletionsTest, StopTokens) {
  Start();
  v1::CompleteRequest request = Prompt("tokens", 40);
  request.set_ignore_eos(true);
  const v1::CompleteResponse all = Complete(request);
  const int32_t stop = all.choices(0).token_ids(20);
  int first = 0;
  while (all.choices(0).token_ids(first) != stop) ++first;
  request.add_stop_token_ids(stop);
  const v1::CompleteResponse ended = Complete(request);
  EXPECT_EQ(ended.choices(0).finish().reason(), v1::Finish::STOP_TOKEN);
  EXPECT_EQ(ended.choices(0).finish().token(), stop);
  EXPECT_EQ(ended.choices(0).token_ids_size(), first + 1);
  EXPECT_EQ(ended.usage().completion_tokens(), first + 1);
}

// Prompts around the block size of 16, cold and again: the same answer, and only full blocks count.
TEST_F(CompletionsTest, PrefixLengthsAroundTheBlock) {
  Start();
  for (const int length : {1, 2, 15, 16, 17, 31, 32, 33, 48, 49}) {
    const v1::CompleteRequest request = Tokens(SomeTokens(length, 100 + length), 8);
    const v1::CompleteResponse cold = Complete(request);
    const v1::CompleteResponse warm = Complete(request);
    EXPECT_EQ(cold.choices(0).text(), warm.choices(0).text()) << length;
    EXPECT_EQ(
        std::vector<int>(cold.choices(0).token_ids().begin(), cold.choices(0).token_ids().end()),
        std::vector<int>(warm.choices(0).token_ids().begin(), warm.choices(0).token_ids().end()));
    EXPECT_EQ(cold.usage().cached_tokens(), 0) << length;
    EXPECT_EQ(cold.usage().prompt_tokens(), length);
    // The last token is always computed.
    EXPECT_EQ(warm.usage().cached_tokens(), (length - 1) / 16 * 16) << length;
    ExpectConsistent(cold.usage());
    ExpectConsistent(warm.usage());
  }
  // No token at all is an error with a name, not a crash.
  v1::CompleteRequest none = Prompt("", 4);
  none.set_add_special_tokens(false);
  grpc::ClientContext context;
  v1::CompleteResponse response;
  EXPECT_EQ(stub_->Complete(&context, none, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(server_->running());
}

// Behaviour 12: unary and last chunk agree on what was cached.
TEST_F(CompletionsTest, CachedTokensAreToldEverywhere) {
  Start();
  const v1::CompleteRequest request = Tokens(SomeTokens(70, 5), 12);
  Complete(request);
  const v1::CompleteResponse unary = Complete(request);
  const Streamed stream = Stream(request);
  EXPECT_EQ(unary.usage().cached_tokens(), 64);
  EXPECT_EQ(stream.started.usage().cached_tokens(), 64);
  EXPECT_EQ(stream.done.usage().cached_tokens(), 64);
  for (const v1::CacheInfo& cache : {unary.cache(), stream.started.cache(), stream.done.cache()}) {
    ASSERT_EQ(cache.segments_size(), 2) << cache.ShortDebugString();
    EXPECT_EQ(cache.target(), "v1");
    EXPECT_EQ(cache.segments(0).source(), "v1");
    EXPECT_EQ(cache.segments(0).plan(), "native");
    EXPECT_EQ(cache.segments(0).tier(), "device");
    EXPECT_EQ(cache.segments(0).tokens(), 64);
    EXPECT_EQ(cache.segments(1).plan(), "fresh");
    EXPECT_EQ(cache.segments(1).tokens(), 6);
  }
  // NATIVE_ONLY reads native blocks; a salt of its own reads none; store: false leaves none.
  v1::CompleteRequest other = request;
  other.mutable_cache()->set_reuse(v1::CacheOptions::NATIVE_ONLY);
  EXPECT_EQ(Complete(other).usage().cached_tokens(), 64);
  other.mutable_cache()->set_salt("mine");
  EXPECT_EQ(Complete(other).usage().cached_tokens(), 0);
  EXPECT_EQ(Complete(other).usage().cached_tokens(), 64);
  v1::CompleteRequest private_one = Tokens(SomeTokens(70, 6), 4);
  private_one.mutable_cache()->set_store(false);
  Complete(private_one);
  EXPECT_EQ(Complete(private_one).usage().cached_tokens(), 0);
}

// Behaviour 13: a seeded request answers the same alone and among unseeded neighbours.
TEST_F(CompletionsTest, SeededIsUntouchedByNeighbours) {
  Start();
  v1::CompleteRequest seeded = Tokens(SomeTokens(20, 1), 60);
  seeded.set_ignore_eos(true);
  seeded.set_temperature(1.2f);
  seeded.set_seed(42);
  const std::string alone = Complete(seeded).choices(0).text();

  std::atomic<bool> stop{false};
  std::vector<std::thread> neighbours;
  for (int i = 0; i < 3; ++i) {
    neighbours.emplace_back([&, i] {
      const auto stub = server_->NewStub();
      for (int round = 0; !stop; ++round) {
        v1::CompleteRequest request = Tokens(SomeTokens(10 + round % 30, 1000 * i + round), 30);
        request.set_temperature(1);
        request.clear_seed();
        carryover::Complete(*stub, request);
      }
    });
  }
  for (int i = 0; i < 6; ++i) EXPECT_EQ(Complete(seeded).choices(0).text(), alone);
  stop = true;
  for (std::thread& thread : neighbours) thread.join();

  // Another seed answers otherwise, and so do two requests without any.
  seeded.set_seed(43);
  EXPECT_NE(Complete(seeded).choices(0).text(), alone);
  seeded.clear_seed();
  EXPECT_NE(Complete(seeded).choices(0).text(), Complete(seeded).choices(0).text());
}

// 256 streams at once, each with its own prompt and seed: none lost, none mixed up.
TEST_F(CompletionsTest, ManyStreamsAtOnce) {
  constexpr int kStreams = 256, kThreads = 32;
  Start("engine { kv_cache_bytes: 67108864 max_running: 48 }");
  const auto request_of = [](int i) {
    v1::CompleteRequest request = Tokens(SomeTokens(4 + i % 40, i), 12 + i % 9);
    request.set_ignore_eos(true);
    request.set_temperature(i % 2 == 0 ? 0 : 1);
    request.set_seed(static_cast<uint64_t>(i));
    request.set_request_id(absl::StrCat("r", i));
    return request;
  };
  std::vector<std::string> solo(kStreams);
  for (int i = 0; i < kStreams; ++i) solo[i] = Complete(request_of(i)).choices(0).text();

  // Each stream is opened before any is read to its end.
  struct Open {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::CompleteEvent>> reader;
  };
  std::vector<Open> open(kStreams);
  const auto other = server_->NewStub();
  for (int i = 0; i < kStreams; ++i) {
    open[i].reader = (i % 2 == 0 ? *stub_ : *other).CompleteStream(&open[i].context, request_of(i));
  }
  std::vector<std::string> text(kStreams), ids(kStreams);
  std::vector<int> done(kStreams);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = thread; i < kStreams; i += kThreads) {
        v1::CompleteEvent event;
        while (open[i].reader->Read(&event)) {
          if (event.has_started()) ids[i] = event.started().request_id();
          if (event.has_delta()) text[i] += event.delta().text();
          if (event.has_done()) ++done[i];
        }
        EXPECT_TRUE(open[i].reader->Finish().ok()) << i;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kStreams; ++i) {
    EXPECT_EQ(done[i], 1) << i;
    EXPECT_EQ(ids[i], absl::StrCat("r", i));
    EXPECT_EQ(text[i], solo[i]) << i;
  }
  EXPECT_EQ(server_->WaitIdle(), "");
}

// Behaviour 8: what arrives later with a lower number runs before what waits.
TEST_F(CompletionsTest, PriorityGoesFirst) {
  Start("engine { kv_cache_bytes: 16777216 max_running: 1 }");
  std::vector<std::future<double>> low;
  for (int i = 0; i < 6; ++i) {
    low.push_back(std::async(std::launch::async, [this, i] {
      v1::CompleteRequest request = Tokens(SomeTokens(30, i), 150);
      request.set_ignore_eos(true);
      request.set_priority(5);
      return carryover::Complete(*server_->NewStub(), request).timing().total();
    }));
  }
  ASSERT_TRUE(server_->WaitMetric("carryover_requests_waiting{class=\"user\"}", 3));
  v1::CompleteRequest urgent = Tokens(SomeTokens(30, 77), 1);
  urgent.set_priority(-5);
  const v1::CompleteResponse first = Complete(urgent);
  // When it is answered most of the others still wait.
  EXPECT_GE(server_->Metric("carryover_requests_waiting{class=\"user\"}"), 2);
  double last = 0;
  for (auto& each : low) last = std::max(last, each.get());
  EXPECT_LT(first.timing().total(), last);
}

TEST_F(CompletionsTest, LogprobsEchoAndLengths) {
  Start();
  v1::CompleteRequest request = Prompt("Hello, world", 10);
  request.set_ignore_eos(true);
  request.set_logprobs(3);
  request.set_prompt_logprobs(2);
  request.set_echo(true);
  const v1::CompleteResponse all = Complete(request);
  EXPECT_EQ(all.prompt_logprobs_size(), all.usage().prompt_tokens() - 1);
  const int prompt_tokens = all.usage().prompt_tokens();
  EXPECT_EQ(all.choices(0).token_ids_size(), prompt_tokens + 10);
  ASSERT_EQ(all.choices(0).logprobs_size(), 10);
  for (int i = 0; i < 10; ++i) {
    const v1::PositionLogprobs& position = all.choices(0).logprobs(i);
    EXPECT_EQ(position.chosen().token(), all.choices(0).token_ids(prompt_tokens + i));
    EXPECT_EQ(position.chosen().rank(), 1) << "greedy";
    ASSERT_EQ(position.top_size(), 3);
    EXPECT_EQ(position.top(0).token(), position.chosen().token());
    EXPECT_GE(position.top(0).logprob(), position.top(1).logprob());
    EXPECT_LE(position.top(0).logprob(), 0);
  }
  EXPECT_EQ(all.choices(0).text().substr(0, 12), "Hello, world");
  EXPECT_EQ(all.choices(0).finish().reason(), v1::Finish::LENGTH);
  // The same text with and without what is only reported.
  v1::CompleteRequest plain = Prompt("Hello, world", 10);
  plain.set_ignore_eos(true);
  EXPECT_EQ("Hello, world" + Complete(plain).choices(0).text(), all.choices(0).text());
  // Prefill only.
  const v1::CompleteResponse prefill = Complete(Prompt("Hello, world", 0));
  EXPECT_EQ(prefill.usage().completion_tokens(), 0);
  // The last tokens of the prompt only.
  v1::CompleteRequest cut = Tokens(SomeTokens(40, 3), 5);
  cut.set_truncate_prompt_tokens(10);
  const std::vector<int32_t> full = SomeTokens(40, 3);
  EXPECT_EQ(Complete(cut).choices(0).text(),
            Complete(Tokens({full.end() - 10, full.end()}, 5)).choices(0).text());
}

TEST_F(CompletionsTest, TokenizeAndBack) {
  Start();
  for (const std::string text : {"Hello, world", "Grüße — 你好 🙂", ""}) {
    v1::TokenizeRequest request;
    request.set_text(text);
    request.set_add_special_tokens(false);
    request.set_with_texts(true);
    v1::TokenizeResponse tokens;
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->Tokenize(&context, request, &tokens).ok());
    EXPECT_EQ(tokens.texts_size(), tokens.tokens_size());
    v1::DetokenizeRequest back;
    *back.mutable_tokens() = tokens.tokens();
    v1::DetokenizeResponse decoded;
    grpc::ClientContext back_context;
    ASSERT_TRUE(stub_->Detokenize(&back_context, back, &decoded).ok());
    EXPECT_EQ(decoded.text(), text);
  }
  // A large text goes to a worker; many at once are all answered.
  std::vector<std::future<int>> many;
  for (int i = 0; i < 8; ++i) {
    many.push_back(std::async(std::launch::async, [this, i] {
      v1::TokenizeRequest request;
      request.set_text(std::string(200'000 + i, 'a'));
      v1::TokenizeResponse response;
      grpc::ClientContext context;
      return stub_->Tokenize(&context, request, &response).ok() ? response.tokens_size() : -1;
    }));
  }
  for (auto& each : many) EXPECT_GT(each.get(), 0);
}

// A folder with a SentencePiece model of single bytes. The library brings a protobuf of its own,
// which must not meet that of the server.
TEST_F(CompletionsTest, SentencePieceNextToProtobuf) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "engine/sentencepiece_model.cc says why";
#endif
  const auto field = [](int number, const std::string& bytes) {
    return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(bytes.size())} + bytes;
  };
  std::string model;
  const auto piece = [&](const std::string& text, char type) {
    // A score (field 2) of 0 and the type (field 3).
    model += field(1, field(1, text) + std::string("\x15\0\0\0\0\x18", 6) + type);
  };
  piece("<unk>", 2);
  piece("<s>", 3);
  piece("</s>", 3);
  for (int byte = 0; byte < 256; ++byte) piece(absl::StrFormat("<0x%02X>", byte), 6);
  model += field(2, std::string("\x18\x02\x98\x02\x01", 5));             // BPE, byte_fallback
  model += field(3, field(1, "identity") + std::string("\x20\x00", 2));  // keeps white space
  const std::filesystem::path folder =
      testing::TempDir() + absl::StrCat("/carryover-sp-", getpid());
  std::filesystem::copy(TinyModel("llama2"), folder);
  std::filesystem::remove(folder / "tokenizer.json");
  std::ofstream(folder / "tokenizer.model", std::ios::binary) << model;

  server_ = ServerProcess::Start(LoadEntry("sp", "v1", folder));
  std::filesystem::remove_all(folder);
  ASSERT_NE(server_, nullptr);
  v1::TokenizeRequest request;
  request.set_text("Aé");
  request.set_add_special_tokens(false);
  v1::TokenizeResponse tokens;
  grpc::ClientContext context;
  ASSERT_TRUE(server_->completions().Tokenize(&context, request, &tokens).ok());
  // The model puts a space, U+2581, before a text.
  const std::vector<int> expected = {3 + 0xE2, 3 + 0x96, 3 + 0x81, 3 + 'A', 3 + 0xC3, 3 + 0xA9};
  EXPECT_EQ(std::vector<int>(tokens.tokens().begin(), tokens.tokens().end()), expected);
  EXPECT_EQ(
      carryover::Complete(server_->completions(), Prompt("Aé", 5)).usage().completion_tokens(), 5);
}

}  // namespace
}  // namespace carryover
