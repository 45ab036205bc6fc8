// The words of generated tasks: how a prefix opens and closes, how a fact and a question are put,
// by kind and style. Pure functions but for the draws; one thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/generate.h"
#include "client/eval/prose.h"

namespace carryover::eval {

struct Phrasing {
  std::string head, tail;  // of the prefix
};
Phrasing PhrasingOf(Kind kind, Style style);

struct Question {
  std::string suffix;
  std::vector<std::string> answers;
  std::string label;  // the answer as it would follow the suffix
  std::vector<std::string> stop;
};

struct Facts {
  std::vector<std::string> sentences;  // in an order of their own, each as it goes into the prose
  std::vector<Question> questions;
};

// INVALID_ARGUMENT when there are too few words.
absl::StatusOr<Facts> MakeFacts(const GenerateOptions& options, int wanted,
                                const std::vector<std::string>& keys,
                                const std::vector<std::string>& values);

// The beginning of a sentence within words [begin, end), to be gone on with as it stands there. At
// most `count`; only beginnings that stand there once.
std::vector<Question> ClozeQuestions(Style style, const Prose& prose, size_t begin, size_t end,
                                     int count, Draw* draw);
// What follows the prefix, each question with more of it.
std::vector<Question> ContinuationQuestions(Style style, const Prose& prose, size_t end, int count);

// All but the prefix and the id.
Item ItemOf(const GenerateOptions& options, const Question& question);

}  // namespace carryover::eval
