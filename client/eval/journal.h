// A run's folder: what was asked for (run.json) and the rows so far (items.jsonl), so that an
// interrupted run goes on where it stopped. One process writes at a time; one thread.
//
//   DIR/run.json     options, tasks files and versions; written once, before the first item
//   DIR/items.jsonl  a row an item as it ends; a later row of the same item replaces an earlier one
//   DIR/eval.json, DIR/eval.html   the report, made from the two
#pragma once

#include <fstream>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/eval/result.h"
#include "nlohmann/json.hpp"

namespace carryover::eval {

inline constexpr int kSchemaVersion = 1;

class Journal {
 public:
  // Makes the folder where there is none. `run` is what is asked for now; its member `identity`
  // must be equal to that of the folder's run, else FAILED_PRECONDITION with what differs. restart:
  // begins anew instead. A last row without its line feed, as a crash leaves it, is dropped.
  static absl::StatusOr<Journal> Open(const std::string& folder, const nlohmann::ordered_json& run,
                                      bool restart);

  // Rows by index, as they were found and appended. Errors are rows, too.
  const std::map<int, ItemResult>& rows() const { return rows_; }
  // As run.json has it: of the run's first start.
  const nlohmann::ordered_json& run() const { return run_; }
  // Flushed before it returns.
  absl::Status Append(const ItemResult& result);

 private:
  std::map<int, ItemResult> rows_;
  nlohmann::ordered_json run_;
  std::ofstream file_;
  std::string path_;
};

// A folder as a report needs it.
struct Recorded {
  nlohmann::ordered_json run;
  std::map<int, ItemResult> rows;
};
absl::StatusOr<Recorded> ReadFolder(const std::string& folder);

// To a temporary name, then renamed.
absl::Status WriteWhole(const std::string& path, const std::string& content);

}  // namespace carryover::eval
