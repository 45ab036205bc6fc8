// The files of server/page/, which the build puts into the program. Immutable; any thread.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carryover {

struct PageFile {
  absl::string_view name;  // "index.html"
  absl::string_view content;
};

absl::Span<const PageFile> PageFiles();

}  // namespace carryover
