// Replaces a file as a whole: who reads it finds the old bytes or the new ones, also after a crash
// at any moment. Any thread.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carryover {

// The file is the owner's alone (0600) and on the disk when this returns. INTERNAL names the path
// and what went wrong; the file is then as it was. A crash may leave PATH.XXXXXX beside it.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes);

}  // namespace carryover
