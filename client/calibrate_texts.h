// The texts that a calibration is given: a folder of text files, one text file or a JSONL file.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carryover {

struct CalibrateTexts {
  std::vector<std::string> texts;  // UTF-8, none empty
  int64_t bytes = 0;
};

// A folder: all its *.txt, *.md and *.jsonl files, sorted, not in folders below. A .jsonl file: a
// text a line, a JSON string or an object with `text` or `prompt` (a string), or `prefix` and
// `suffix` as eval takes them, which are joined. Any other file: one text. INVALID_ARGUMENT or
// NOT_FOUND names the file and the line; so does a file of all together over max_bytes.
absl::StatusOr<CalibrateTexts> ReadCalibrateTexts(const std::string& path, int64_t max_bytes);

}  // namespace carryover
