#include "client/eval/journal.h"

#include <cstdio>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace carryover::eval {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

absl::StatusOr<Json> ReadRun(const std::string& folder) {
  const std::string path = folder + "/run.json";
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  Json run = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!run.is_object() || !run.contains("identity")) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not what a run writes"));
  }
  if (!run.contains("schema_version") || run["schema_version"] != kSchemaVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": schema_version is not ", kSchemaVersion));
  }
  return run;
}

// Reads the rows; whole: how many bytes of the file are whole lines.
absl::Status ReadRows(const std::string& folder, std::map<int, ItemResult>* rows, int64_t* whole) {
  const std::string path = folder + "/items.jsonl";
  std::ifstream file(path, std::ios::binary);
  *whole = 0;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (file.eof()) break;  // no line feed: cut off
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    absl::StatusOr<ItemResult> result = ResultFromJson(json);
    if (!result.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": ", result.status().message()));
    }
    const int index = result->index;
    (*rows)[index] = *std::move(result);
    *whole += static_cast<int64_t>(line.size()) + 1;
  }
  return absl::OkStatus();
}

// The first member that differs, for people.
std::string Difference(const Json& before, const Json& now) {
  for (const auto& [key, value] : before.items()) {
    const auto other = now.find(key);
    if (other == now.end() || *other != value) {
      return absl::StrCat(key, " was ", value.dump().substr(0, 200), " and is ",
                          other == now.end() ? "missing" : other->dump().substr(0, 200));
    }
  }
  for (const auto& [key, value] : now.items()) {
    if (!before.contains(key)) return absl::StrCat(key, " is new");
  }
  return "they differ";
}

}  // namespace

absl::Status WriteWhole(const std::string& path, const std::string& content) {
  const std::string temporary = path + ".new";
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << content;
    file.flush();
    if (!file) return absl::UnavailableError(absl::StrCat(temporary, ": cannot be written"));
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Journal> Journal::Open(const std::string& folder, const Json& run, bool restart) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    return absl::InvalidArgumentError(absl::StrCat(folder, ": cannot be made: ", error.message()));
  }
  Journal journal;
  journal.path_ = folder + "/items.jsonl";
  if (restart) {
    fs::remove(folder + "/run.json", error);
    fs::remove(journal.path_, error);
  }
  if (fs::exists(folder + "/run.json")) {
    ASSIGN_OR_RETURN(journal.run_, ReadRun(folder));
    if (journal.run_["identity"] != run["identity"]) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder, " holds another run: ", Difference(journal.run_["identity"], run["identity"]),
          ". Choose another folder, or --restart to begin anew in this one"));
    }
    int64_t whole = 0;
    RETURN_IF_ERROR(ReadRows(folder, &journal.rows_, &whole));
    if (fs::exists(journal.path_)) fs::resize_file(journal.path_, whole, error);
    if (error) return absl::UnavailableError(absl::StrCat(journal.path_, ": ", error.message()));
  } else {
    journal.run_ = run;
    RETURN_IF_ERROR(WriteWhole(folder + "/run.json", run.dump(2) + "\n"));
    fs::remove(journal.path_, error);
  }
  journal.file_.open(journal.path_, std::ios::binary | std::ios::app);
  if (!journal.file_) {
    return absl::UnavailableError(absl::StrCat(journal.path_, ": cannot be written"));
  }
  return journal;
}

absl::Status Journal::Append(const ItemResult& result) {
  file_ << ResultToJson(result).dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  file_.flush();
  if (!file_) return absl::UnavailableError(absl::StrCat(path_, ": cannot be written"));
  rows_[result.index] = result;
  return absl::OkStatus();
}

absl::StatusOr<Recorded> ReadFolder(const std::string& folder) {
  Recorded recorded;
  ASSIGN_OR_RETURN(recorded.run, ReadRun(folder));
  int64_t whole = 0;
  RETURN_IF_ERROR(ReadRows(folder, &recorded.rows, &whole));
  return recorded;
}

}  // namespace carryover::eval
