// Whether an answer is right. Pure functions; any thread.
//
// Texts are compared after normalising: letters to lower case (ASCII), punctuation to nothing,
// the articles a, an and the dropped, runs of white space to one blank (SQuAD's rules, which
// LongBench uses, too).
//   starts   right when the normalised answer begins with a right one, as whole words
//   token    right when the first generated token is the labelled answer's first: for answers of
//   one
//            token, whatever the model says after it
//   share    score: share of the right ones that stand in the answer, as RULER's string_match_all
//            (case ignored, not normalised); right when all of them do
//   qa       score: the best F1 over words (SQuAD); right when a right one stands in the answer as
//            whole words
//   class    the classes named in the answer, less those that lie within a right one: score is 1
//            over their number when a right one is among them (LongBench); right when it is alone
//   summary  score: the best ROUGE-L F1 over words; nothing is right or wrong
//   none     neither
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/eval/item.h"

namespace carryover::eval {

struct Score {
  std::optional<double> value;  // in [0, 1]
  std::optional<bool> right;
};

// All but `token`, which needs tokens: nothing is right or wrong then.
Score ScoreAnswer(const Item& item, absl::string_view answer);
Score ScoreToken(int32_t labelled, const std::vector<int32_t>& tokens);

std::string Normalized(absl::string_view text);
// 2 P R / (P + R) over the multisets of words. Of normalised texts.
double WordF1(absl::string_view answer, absl::string_view truth);
// The same with the longest common subsequence for what both have. Over at most 2,000 words each.
double RougeL(absl::string_view answer, absl::string_view truth);

}  // namespace carryover::eval
