#include "server/status_page.h"

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "server/page_files.h"

namespace carryover {
namespace {

// Where the tables go in server/page/index.html.
constexpr absl::string_view kPlace = "<!-- the server writes its tables here -->";

std::string Escape(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string Size(int64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (value >= 1 << 30) return absl::StrFormat("%.2f GiB", value / (1 << 30));
  if (value >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  return absl::StrFormat("%.1f KiB", value / 1024);
}

// Cells that start with '#' are numbers, aligned right.
std::string Row(const char* tag, std::initializer_list<std::string> cells) {
  std::string row = "<tr>";
  for (const std::string& cell : cells) {
    const bool number = !cell.empty() && cell[0] == '#';
    absl::StrAppend(&row, "<", tag, number ? " class=\"n\">" : ">",
                    Escape(absl::string_view(cell).substr(number ? 1 : 0)), "</", tag, ">");
  }
  return row + "</tr>\n";
}

std::string Number(int64_t value) { return absl::StrCat("#", value); }

std::string Tables(const std::vector<VersionInfo>& versions, const EngineSnapshot& now,
                   absl::string_view build_version) {
  std::string page;
  absl::StrAppend(&page, "<p>Version ", Escape(build_version), ". ",
                  now.draining ? "Draining. " : "", now.running, " running, ", now.waiting,
                  " waiting (", now.waiting_tokens,
                  " tokens). KV blocks: ", now.device_blocks_active, " in use by requests, ",
                  now.device_blocks_used, " in use in all, of ", now.device_blocks, ".</p>\n");
  if (now.provenance_violations != 0) {
    absl::StrAppend(&page, "<p class=\"bad\">", now.provenance_violations,
                    " provenance violations: carried state was taken for native.</p>\n");
  }

  if (versions.empty()) {
    page += "<p>No version is loaded.</p>\n";
  } else {
    page += "<div class=\"box\"><table><caption>Versions</caption>";
    page += Row("th", {"model", "version", "state", "#share", "carries from", "precision",
                       "#weights", "#running", "#cached tokens", "fingerprint"});
    for (const VersionInfo& info : versions) {
      page +=
          Row("td", {info.model, info.version, info.state, absl::StrFormat("#%g %%", info.share),
                     absl::StrJoin(info.carry_from, ", "),
                     absl::StrCat(info.weights_dtype, " / ", info.kv_dtype),
                     absl::StrCat("#", Size(info.weight_bytes)), Number(info.running_requests),
                     Number(info.cached_tokens), info.fingerprint.substr(0, 12)});
    }
    page += "</table></div>\n";
  }

  if (now.store.empty()) {
    page += "<p>The prefix cache is empty.</p>\n";
  } else {
    page += "<div class=\"box\"><table><caption>Prefix cache</caption>";
    page += Row("th", {"model", "computed by", "tier", "#blocks", "#bytes", "#hit tokens"});
    for (const StoreRow& row : now.store) {
      page += Row("td", {row.model, row.provenance, row.tier, Number(row.blocks),
                         absl::StrCat("#", Size(row.bytes)), Number(row.hit_tokens)});
    }
    page += "</table></div>\n";
  }
  return page;
}

}  // namespace

std::string StatusPage(const std::vector<VersionInfo>& versions, const EngineSnapshot& now,
                       absl::string_view build_version) {
  for (const PageFile& file : PageFiles()) {
    if (file.name != "index.html") continue;
    return absl::StrReplaceAll(file.content, {{kPlace, Tables(versions, now, build_version)}});
  }
  return "";
}

}  // namespace carryover
