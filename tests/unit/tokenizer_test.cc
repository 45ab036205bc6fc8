// Small hand-made tokenizers: what the reference test (tests/golden) cannot show, which is errors,
// bounds, identity and streaming. What the ids of real text are is that test's matter.
#include "engine/tokenizer.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/utf8.h"
#include "engine/byte_level.h"
#include "engine/normalizer.h"
#include "engine/regex.h"

namespace carryover {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

// A byte-level BPE: the 256 bytes as ids 0 to 255, then "he", "ll", "hell", "hello", " hello".
json ByteLevelJson() {
  json vocab = json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[ByteCharacters()[byte]] = byte;
  int next = 256;
  for (const char* token : {"he", "ll", "hell", "hello", "Ġhello"}) vocab[token] = next++;
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const auto added = [](int id, const char* content, bool special) {
    return json{{"id", id}, {"content", content}, {"special", special}, {"normalized", false}};
  };
  return {{"version", "1.0"},
          {"added_tokens", {added(261, "<|end|>", true), added(262, "<tool>", false)}},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocab},
            {"merges", {"h e", "l l", "he ll", "hell o", "Ġ hello"}}}}};
}

// The wire form of a SentencePiece model: a BPE over "ab", with byte fallback.
std::string SentencePieceBytes() {
  const auto field = [](int number, const std::string& bytes) {
    return absl::StrCat(std::string(1, static_cast<char>(number << 3 | 2)),
                        std::string(1, static_cast<char>(bytes.size())), bytes);
  };
  std::string model;
  const auto piece = [&](const std::string& text, float score, int type) {
    std::string body = field(1, text);
    body.push_back(static_cast<char>(2 << 3 | 5));
    body.append(reinterpret_cast<const char*>(&score), sizeof(score));
    body += std::string{static_cast<char>(3 << 3), static_cast<char>(type)};
    model += field(1, body);
  };
  piece("<unk>", 0, 2);
  piece("<s>", 0, 3);
  piece("</s>", 0, 3);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    snprintf(name, sizeof(name), "<0x%02X>", byte);
    piece(name, 0, 6);
  }
  piece("\u2581ab", -0.0f, 1);  // 259
  piece("ab", -1.0f, 1);
  piece("\u2581", -2.0f, 1);
  piece("a", -3.0f, 1);
  piece("b", -4.0f, 1);
  model += field(2, std::string("\x18\x02\x98\x02\x01", 5));             // BPE, byte_fallback
  model += field(3, field(1, "identity") + std::string("\x20\x00", 2));  // keeps white space
  return model;
}

class TokenizerTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/tokenizer_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, absl::string_view content) {
    std::ofstream(folder_ + "/" + name, std::ios::binary)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
  }
  absl::StatusOr<std::unique_ptr<const Tokenizer>> LoadJson(const json& document) {
    Write("tokenizer.json", document.dump());
    return Tokenizer::Load(folder_);
  }
  std::unique_ptr<const Tokenizer> MustLoad(const json& document) {
    auto tokenizer = LoadJson(document);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
  }
  // The error that loading gives, which has to name the file.
  std::string ErrorOf(const json& document) {
    const auto tokenizer = LoadJson(document);
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(tokenizer.status().message(), folder_ + "/tokenizer.json: "))
        << tokenizer.status();
    return std::string(tokenizer.status().message());
  }
  static Ids Encode(const Tokenizer& tokenizer, absl::string_view text, bool special = false) {
    const auto ids = tokenizer.Encode(text, {.add_special_tokens = special});
    EXPECT_TRUE(ids.ok()) << ids.status();
    return ids.value_or(Ids{});
  }

  std::string folder_;
};

std::string Streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip) {
  const auto stream = tokenizer.NewStreamDecoder(skip);
  std::string text;
  const auto add = [&](const std::string& piece) {
    EXPECT_EQ(FirstInvalidUtf8(piece), piece.size());
    text += piece;
  };
  for (const int32_t id : ids) add(stream->Add(id));
  add(stream->Finish());
  return text;
}

TEST_F(TokenizerTest, MergesByRankAndFindsAddedTokens) {
  const auto tokenizer = MustLoad(ByteLevelJson());
  EXPECT_EQ(Encode(*tokenizer, "hello hello"), (Ids{259, 260}));
  EXPECT_EQ(Encode(*tokenizer, "hel"), (Ids{256, 'l'}));
  EXPECT_EQ(Encode(*tokenizer, "he<|end|>ll<tool>"), (Ids{256, 261, 257, 262}));
  EXPECT_EQ(Encode(*tokenizer, ""), Ids{});
  EXPECT_EQ(tokenizer->vocab_size(), 263);
  EXPECT_TRUE(tokenizer->IsSpecial(261));
  EXPECT_FALSE(tokenizer->IsSpecial(262));
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
  EXPECT_EQ(tokenizer->TokenText(260), "Ġhello");
  EXPECT_EQ(tokenizer->TokenText(263), "");
}

TEST_F(TokenizerTest, MergesMayBePairs) {
  json document = ByteLevelJson();
  const auto strings = MustLoad(document);
  json& merges = document["model"]["merges"];
  for (json& merge : merges) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    merge = json::array({text.substr(0, space), text.substr(space + 1)});
  }
  const auto pairs = MustLoad(document);
  EXPECT_EQ(Encode(*pairs, "hello hello"), (Ids{259, 260}));
  EXPECT_EQ(strings->sha256(), pairs->sha256());
}

TEST_F(TokenizerTest, TemplateAddsSpecialTokens) {
  json document = ByteLevelJson();
  const json end = {{"SpecialToken", {{"id", "<|end|>"}}}};
  document["post_processor"] = {{"type", "TemplateProcessing"},
                                {"single", {end, {{"Sequence", {{"id", "A"}}}}, end, end}},
                                {"special_tokens", {{"<|end|>", {{"ids", {261}}}}}}};
  const auto tokenizer = MustLoad(document);
  EXPECT_EQ(Encode(*tokenizer, "he", true), (Ids{261, 256, 261, 261}));
  EXPECT_EQ(Encode(*tokenizer, "he", false), (Ids{256}));
  document["post_processor"]["special_tokens"]["<|end|>"]["ids"] = {9999};
  EXPECT_TRUE(absl::StrContains(ErrorOf(document), "9999 is not in the vocabulary"));
}

TEST_F(TokenizerTest, RefusesInvalidUtf8) {
  const auto tokenizer = MustLoad(ByteLevelJson());
  for (const absl::string_view text : {"\xff", "ab\xc3", "\xed\xa0\x80", "\xc0\xaf"}) {
    const auto ids = tokenizer->Encode(text, {});
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(absl::StrContains(tokenizer->Encode("ab\xc3", {}).status().message(), "byte 2"));
}

TEST_F(TokenizerTest, DecodesAndSkipsSpecialTokens) {
  const auto tokenizer = MustLoad(ByteLevelJson());
  const Ids ids = {261, 259, -5, 99999, 262, 261};
  EXPECT_EQ(tokenizer->Decode(ids, false), "<|end|>hello<tool><|end|>");
  EXPECT_EQ(tokenizer->Decode(ids, true), "hello<tool>");
  EXPECT_EQ(Streamed(*tokenizer, ids, true), "hello<tool>");
}

TEST_F(TokenizerTest, StreamHoldsBackASplitCharacter) {
  const auto tokenizer = MustLoad(ByteLevelJson());
  const auto stream = tokenizer->NewStreamDecoder(false);
  EXPECT_EQ(stream->Add('x'), "x");
  EXPECT_EQ(stream->Add(0xF0), "");
  EXPECT_EQ(stream->Add(0x9F), "");
  EXPECT_EQ(stream->Add(0x98), "");
  EXPECT_EQ(stream->Add(0x80), "\U0001F600");
  EXPECT_EQ(stream->Add(0xC3), "");
  EXPECT_EQ(stream->Add('y'), "\uFFFDy");
  EXPECT_EQ(stream->Add(0xE4), "");
  EXPECT_EQ(stream->Finish(), "\uFFFD");
}

TEST_F(TokenizerTest, StreamedPiecesJoinToTheText) {
  const auto tokenizer = MustLoad(ByteLevelJson());
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    Ids ids(random() % 20);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % 270);
    const bool skip = round % 2 == 0;
    ASSERT_EQ(Streamed(*tokenizer, ids, skip), tokenizer->Decode(ids, skip));
  }
}

// The usual decoder of a byte-fallback vocabulary.
json FallbackDecoder(int stop) {
  return {{"type", "Sequence"},
          {"decoders",
           {{{"type", "Replace"}, {"pattern", {{"String", "_"}}}, {"content", " "}},
            {{"type", "ByteFallback"}},
            {{"type", "Fuse"}},
            {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", stop}}}}};
}

TEST_F(TokenizerTest, ByteFallbackRunsAreTextOrMarks) {
  json document = ByteLevelJson();
  document["pre_tokenizer"] = nullptr;
  document["decoder"] = FallbackDecoder(2);
  document["model"]["merges"] = json::array();
  document["model"]["vocab"] = {{"a", 0}, {"_", 1}, {"<0xC3>", 2}, {"<0xA9>", 3}, {"<0x41>", 4}};
  document["added_tokens"] = json::array();
  const auto tokenizer = MustLoad(document);
  const auto text = [&](const Ids& ids) {
    EXPECT_EQ(Streamed(*tokenizer, ids, false), tokenizer->Decode(ids, false));
    return tokenizer->Decode(ids, false);
  };
  EXPECT_EQ(text({1, 1, 0, 1, 0}), " a a");
  EXPECT_EQ(text({2, 3, 0}), "éa");
  EXPECT_EQ(text({4, 2, 0}), "\uFFFD\uFFFDa");  // one bad byte spoils its run
  EXPECT_EQ(text({0, 1, 1, 1}), "a ");          // up to two spaces go at the end
  EXPECT_EQ(text({0, 1, 0, 1, 1}), "a a");
}

TEST_F(TokenizerTest, IdentityIsOfContentNotOfForm) {
  const json document = ByteLevelJson();
  const auto compact = MustLoad(document);
  Write("tokenizer.json", document.dump(3));
  const auto spread = Tokenizer::Load(folder_);
  ASSERT_TRUE(spread.ok());
  EXPECT_EQ(compact->sha256(), (*spread)->sha256());

  std::vector<json> others(5, document);
  std::swap(others[0]["model"]["vocab"]["a"], others[0]["model"]["vocab"]["b"]);
  std::swap(others[1]["model"]["merges"][0], others[1]["model"]["merges"][1]);
  others[2]["added_tokens"][1]["special"] = true;
  others[3]["pre_tokenizer"]["add_prefix_space"] = true;
  others[4]["normalizer"] = {{"type", "NFC"}};
  for (const json& other : others) EXPECT_NE(MustLoad(other)->sha256(), compact->sha256());
}

TEST_F(TokenizerTest, ErrorsNameTheField) {
  const auto changed = [](const char* pointer, const json& value) {
    json document = ByteLevelJson();
    document[json::json_pointer(pointer)] = value;
    return document;
  };
  const struct {
    const char* pointer;
    json value;
    const char* message;
  } cases[] = {
      {"/normalizer", {{"type", "Lowercase"}}, "normalizer.type: \"Lowercase\" is not supported"},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}},
       "normalizer.normalizers[0].type: \"NFKC\" is not supported"},
      {"/pre_tokenizer", {{"type", "BertPreTokenizer"}}, "pre_tokenizer.type: \"BertPreTok"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}},
       "pre_tokenizer.pattern.Regex: the pattern \"(a\" does not compile"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Sideways"}},
       "pre_tokenizer.behavior: \"Sideways\" is not known"},
      {"/post_processor", {{"type", "RobertaProcessing"}}, "post_processor.type: \"Roberta"},
      {"/decoder", {{"type", "WordPiece"}}, "decoder.type: \"WordPiece\" is not supported"},
      {"/model/type", "Unigram", "model.type: \"Unigram\" is not supported"},
      {"/model/dropout", 0.1, "model.dropout: is not supported"},
      {"/model/unk_token", "<unk>", "model.unk_token: \"<unk>\" is not in the vocabulary"},
      {"/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix: is not supported"},
      {"/model/merges", json::object(), "model.merges: an array is needed"},
      {"/model/merges/1", "l q", "model.merges[1]: \"lq\" is not in the vocabulary"},
      {"/model/merges/2", "hell", "model.merges[2]: two tokens"},
      {"/model/merges/2", 7, "model.merges[2]: a pair of tokens is needed"},
      {"/model/vocab", json::array(), "model.vocab: an object with tokens is needed"},
      {"/model/vocab/he", -1, "model.vocab[\"he\"]: is -1"},
      {"/model/vocab/he", 2000000000, "model.vocab[\"he\"]: is 2000000000, must be 0 to"},
      {"/model/vocab/he", 1.5, "model.vocab[\"he\"]: a whole number is needed"},
      {"/model/vocab/he", 257, "have the same id 257"},
      {"/added_tokens/0/id", 2000000000, "added_tokens[0].id: is 2000000000"},
      {"/added_tokens/0/id", 262, "have the same id 262"},
      {"/added_tokens/0/content", "he", "\"he\" has id 261, but model.vocab gives it 256"},
      {"/added_tokens/0/special", "yes", "added_tokens[0].special: true or false is needed"},
      {"/added_tokens", 5, "added_tokens: an array is needed"},
  };
  for (const auto& c : cases) {
    const std::string error = ErrorOf(changed(c.pointer, c.value));
    EXPECT_TRUE(absl::StrContains(error, c.message)) << error << "\nwanted: " << c.message;
  }
}

TEST_F(TokenizerTest, RefusesFilesThatAreNotTokenizers) {
  EXPECT_EQ(Tokenizer::Load(folder_).status().code(), absl::StatusCode::kNotFound);
  for (const std::string& content :
       {std::string("{"), std::string("[1]"), std::string("{\"model\": 5}"), std::string("\xff"),
        std::string(100000, '['), std::string("{\"model\":{\"vocab\":{\"a\":0,\"a\":1}}}")}) {
    Write("tokenizer.json", content);
    EXPECT_EQ(Tokenizer::Load(folder_).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(TokenizerTest, MutatedFilesLoadOrFailCleanly) {
  const std::string good = ByteLevelJson().dump();
  std::mt19937 random(11);
  int failed = 0;
  for (int round = 0; round < 300; ++round) {
    std::string bad = good;
    for (int edit = 0; edit < 1 + round % 3; ++edit) {
      const size_t at = random() % bad.size();
      if (round % 2 == 0) {
        bad[at] = static_cast<char>(random());
      } else {
        bad.erase(at, 1 + random() % 8);
      }
    }
    Write("tokenizer.json", bad);
    const auto tokenizer = Tokenizer::Load(folder_);
    failed += tokenizer.ok() ? 0 : 1;
    if (tokenizer.ok()) (void)(*tokenizer)->Encode("hello <|end|>é", {});
  }
  EXPECT_GT(failed, 100);
}

// Each would take minutes where the work grows with the square of the length.
TEST_F(TokenizerTest, LongWordsAndMarksStayFast) {
  json document = ByteLevelJson();
  document["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = MustLoad(document);
  const auto start = std::chrono::steady_clock::now();
  std::string marks = "a";
  for (int i = 0; i < 60000; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0323";
  std::string hello;
  for (int i = 0; i < 60000; ++i) hello += "hello";
  EXPECT_EQ(Encode(*tokenizer, hello).size(), 60000u);
  EXPECT_EQ(Encode(*tokenizer, std::string(300000, 'a')).size(), 300000u);
  EXPECT_FALSE(Encode(*tokenizer, marks).empty());
  EXPECT_FALSE(Encode(*tokenizer, std::string(300000, ' ')).empty());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_F(TokenizerTest, APatternThatBacktracksForeverIsAnError) {
  json document = ByteLevelJson();
  document["pre_tokenizer"] = {
      {"type", "Split"}, {"pattern", {{"Regex", "(a|aa)+c"}}}, {"behavior", "Isolated"}};
  const auto tokenizer = MustLoad(document);
  const auto ids = tokenizer->Encode(std::string(300, 'a') + "dc", {});
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument) << ids.status();
}

TEST_F(TokenizerTest, SentencePieceModel) {
  Write("tokenizer.model", SentencePieceBytes());
  const auto loaded = Tokenizer::Load(folder_);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Tokenizer& tokenizer = **loaded;
  EXPECT_EQ(tokenizer.vocab_size(), 264);
  EXPECT_EQ(Encode(tokenizer, "abab", true), (Ids{1, 259, 260}));
  EXPECT_EQ(Encode(tokenizer, "ab\n", false), (Ids{259, 3 + 10}));
  EXPECT_EQ(Encode(tokenizer, "ab</s>ab", false), (Ids{259, 2, 259}));
  EXPECT_EQ(tokenizer.Decode({1, 259, 2, 259, 260}, true), "ab abab");
  EXPECT_EQ(tokenizer.Decode({1, 259, 2}, false), "<s> ab</s>");
  EXPECT_EQ(Streamed(tokenizer, {259, 3 + 0xC3, 3 + 0xA9, 259}, false), "abé ab");
  EXPECT_TRUE(tokenizer.IsSpecial(2));
  EXPECT_EQ(tokenizer.Encode("\xff", {}).status().code(), absl::StatusCode::kInvalidArgument);
  const Digest before = tokenizer.sha256();

  Write("tokenizer_config.json",
        R"({"add_bos_token": false, "add_eos_token": true, "legacy": false,
            "added_tokens_decoder": {"264": {"content": "<new>", "special": false}}})");
  const auto configured = Tokenizer::Load(folder_);
  ASSERT_TRUE(configured.ok()) << configured.status();
  EXPECT_EQ(Encode(**configured, "ab<new>ab", true), (Ids{259, 264, 260, 2}));
  EXPECT_NE((*configured)->sha256(), before);

  Write("tokenizer_config.json", R"({"bos_token": "<nowhere>"})");
  EXPECT_TRUE(absl::StrContains(Tokenizer::Load(folder_).status().message(),
                                "tokenizer_config.json: bos_token: \"<nowhere>\" is not in"));
  Write("tokenizer_config.json", R"({"added_tokens_decoder": {"1": {"content": "<t>"}}})");
  EXPECT_EQ(Tokenizer::Load(folder_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TokenizerTest, BrokenSentencePieceModels) {
  const std::string good = SentencePieceBytes();
  for (const std::string& bad : {std::string("IQ== 0\nIg== 1\n"), good.substr(0, good.size() / 2),
                                 std::string(64, '\xff')}) {
    Write("tokenizer.model", bad);
    EXPECT_EQ(Tokenizer::Load(folder_).status().code(), absl::StatusCode::kInvalidArgument);
  }
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::string bad = good;
    bad[random() % bad.size()] = static_cast<char>(random());
    Write("tokenizer.model", bad);
    const auto tokenizer = Tokenizer::Load(folder_);
    if (tokenizer.ok()) (void)(*tokenizer)->Encode("ab é", {});
  }
}

TEST(RegexTest, RefusesWhatMeansSomethingElse) {
  for (const char* pattern :
       {"[a[bc]]", "[a-z&&[^b]]", "[[:punct:]]", "a(?i)b", "(?m:.)", "\\p{N}{1,3}+", "\\G",
        "(*UTF)a", "[\\s-.]", "\\xe9", "[a", "\\", "\\p{", "(?#x)", "[\\W]"}) {
    EXPECT_EQ(Regex::Compile(pattern).status().code(), absl::StatusCode::kInvalidArgument)
        << pattern;
  }
}

TEST(RegexTest, SpacesAreUnicodes) {
  const auto regex = Regex::Compile("\\s+");
  ASSERT_TRUE(regex.ok());
  RegexMatcher matcher(*regex);
  size_t begin = 0, end = 0;
  const std::string text = "a\u180e\u00a0\u3000b";
  const auto found = matcher.Find(text, 0, &begin, &end);
  ASSERT_TRUE(found.ok() && *found);
  EXPECT_EQ(text.substr(begin, end - begin), "\u00a0\u3000");  // U+180E is none
}

TEST(NormalizerTest, Nfc) {
  EXPECT_EQ(NormalizeNfc("Cafe\u0301"), "Caf\u00e9");
  EXPECT_EQ(NormalizeNfc("s\u0307\u0323"), "\u1e69");
  EXPECT_EQ(NormalizeNfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(NormalizeNfc("\u212b"), "\u00c5");
  EXPECT_EQ(NormalizeNfc("\u0958"), "\u0915\u093c");  // excluded from composition
}

}  // namespace
}  // namespace carryover
