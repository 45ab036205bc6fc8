// Makes tasks for the evaluator: facts strewn over a real text, and questions about them. All
// follows from the options, the text and the tokenizer: the same seed gives the same items.
//
// A prefix has exactly the tokens asked for, as the tokenizer counts it with its special tokens,
// and stays a prefix, token by token, when a question follows. Several questions share one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/eval/item.h"

namespace carryover::eval {

// A tokenizer, wherever it is.
class Tokens {
 public:
  virtual ~Tokens() = default;
  virtual absl::StatusOr<std::vector<int32_t>> Encode(const std::string& text, bool special) = 0;
};

enum class Kind : uint8_t {
  kKv,       // single-token value of a single-token key
  kHops,     // the value is the same as another key's, over `hops` steps
  kNeedles,  // all of the `needles` values of a key
  kQa,       // the words that follow a passage's beginning in the text
  kText,     // how the text goes on; no right answer
};
enum class Style : uint8_t {
  kPlain,
  kChat,     // SmolLM2's and ChatML's turns
  kDemoOld,  // what the demo pair's 2026-10 was trained on
  kDemoNew,  // and its 2026-11
};
absl::StatusOr<Kind> KindFromName(absl::string_view name);  // "kv", "hops", "needles", "qa", "text"
absl::StatusOr<Style> StyleFromName(
    absl::string_view name);  // "plain", "chat", "demo-2026-10", ...

struct GenerateOptions {
  Kind kind = Kind::kKv;
  Style style = Style::kPlain;
  std::vector<int32_t> lengths = {256, 512, 1024, 2048, 4096};
  int per_length = 32;  // items
  int per_prefix = 4;   // items that share a prefix
  int facts = 0;        // in a prefix; 0: one for 32 tokens in the demo's styles, for 128 in others
  int hops = 2;
  int needles = 3;
  int max_tokens = 0;  // 0: as the kind needs
  uint64_t seed = 1;
  std::string task;  // its name; empty: the kind's, with the style's
  // Words that facts are made of; empty: single-token words of the text.
  std::vector<std::string> keys, values;
};

// text: a real one, UTF-8. INVALID_ARGUMENT when it or its words are too few, or a length is too
// short for what is asked; else what the tokenizer says.
absl::StatusOr<std::vector<Item>> GenerateItems(const GenerateOptions& options,
                                                const std::string& text, Tokens* tokens);

}  // namespace carryover::eval
