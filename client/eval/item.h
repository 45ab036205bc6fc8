// What the evaluator asks: items of a tasks file, a JSON object a line. Pure functions; any thread.
//
// Three formats are told apart by their fields:
//   ours        {task, prefix, suffix, answers[], stop?, id?, max_tokens?, metric?}
//               prefix_tokens / suffix_tokens (token ids) may stand for the texts.
//   LongBench   {input, context, answers[], dataset, ...}; {length, language, all_classes, _id}
//   RULER       {index, input, outputs[]}; {length, answer_prefix}
// The prefix is what the old version's cache holds; the suffix is computed by whoever answers.
//   LongBench   prefix: "Read the text and answer the question.\n\n" + context;
//               suffix: "\n\nQuestion: " + input + "\nAnswer:". Sets without a question (input is
//               empty) get "\n\nSummary:".
//   RULER       the input is cut before its last line that is not empty, which holds the question;
//               an answer_prefix is appended to the suffix where the input does not end with it.
//               The task is the file's name without its ending.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace carryover::eval {

// How an answer is scored; scoring.h says what each means.
enum class Metric : uint8_t {
  kStarts,   // the answer begins with one of the right ones
  kToken,    // the first token is the labelled answer's
  kShare,    // share of the right ones that it contains
  kQa,       // token F1 and containment
  kClass,    // contains the right class and no other
  kSummary,  // ROUGE-L
  kNone,     // nothing to compare with: continuation
};
const char* MetricName(
    Metric metric);  // "starts", "token", "share", "qa", "class", "summary", "none"

struct Item {
  std::string id;    // of the line, else the file's name and the line's number
  std::string task;  // 1 to 64 of letters, digits and - _ . / :
  Metric metric = Metric::kStarts;
  std::string prefix, suffix;  // UTF-8; empty where token ids stand for them
  std::vector<int32_t> prefix_ids, suffix_ids;
  std::vector<std::string> answers;
  std::vector<std::string> classes;  // kClass: all that there are
  std::vector<std::string> stop;
  std::optional<int> max_tokens;
  std::string label;  // text of the labelled answer as it would follow the prompt; may be empty

  bool has_ids() const { return !prefix_ids.empty(); }
};

inline constexpr size_t kMaxLineBytes = size_t{16} << 20;
inline constexpr size_t kMaxItems = 1000000;

// One line, without its line feed. `where` (FILE:LINE) begins the message of an error, which names
// the field. `stem` is the file's name without folder and ending.
absl::StatusOr<Item> ParseItem(absl::string_view line, absl::string_view where,
                               absl::string_view stem);

// All lines that are not blank. The first bad line is the error. NOT_FOUND, INVALID_ARGUMENT.
absl::StatusOr<std::vector<Item>> ReadItems(const std::string& path);

// As a line of our own format.
nlohmann::ordered_json ItemToJson(const Item& item);

// 64 hex digits over all that decides the item's answers.
std::string ItemKey(const Item& item);
// The same over the prefix alone: equal for items that share it.
std::string PrefixKey(const Item& item);

}  // namespace carryover::eval
