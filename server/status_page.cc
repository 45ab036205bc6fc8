#include "server/status_page.h"

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace carryover {
namespace {

constexpr char kHead[] =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>carryover</title>\n"
    "<meta name=\"viewport\" content=\"width=device-width\"><style>\n"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;"
    "color:#1c2430;background:#fff}\n"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}\n"
    "table{border-collapse:collapse;width:100%}\n"
    "th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #d9dee6}\n"
    "td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\n"
    "code{font-size:.9em}.bad{color:#b00020;font-weight:600}\n"
    "@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}"
    "th,td{border-color:#323b48}}\n"
    "</style></head><body>\n";

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

}  // namespace

std::string StatusPage(const std::vector<VersionInfo>& versions, const EngineSnapshot& now,
                       absl::string_view build_version) {
  std::string page = kHead;
  absl::StrAppend(&page, "<h1>carryover ", Escape(build_version), "</h1>\n<p>",
                  now.draining ? "Draining. " : "", now.running, " running, ", now.waiting,
                  " waiting (", now.waiting_tokens,
                  " tokens). KV blocks: ", now.device_blocks_active, " in use by requests, ",
                  now.device_blocks_used, " in use in all, of ", now.device_blocks, ".</p>\n");
  if (now.provenance_violations != 0) {
    absl::StrAppend(&page, "<p class=\"bad\">", now.provenance_violations,
                    " provenance violations: carried state was taken for native.</p>\n");
  }

  page += "<h2>Versions</h2>\n";
  if (versions.empty()) {
    page += "<p>None is loaded.</p>\n";
  } else {
    page += "<table>";
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
    page += "</table>\n";
  }

  page += "<h2>Prefix cache</h2>\n";
  if (now.store.empty()) {
    page += "<p>Empty.</p>\n";
  } else {
    page += "<table>";
    page += Row("th", {"model", "computed by", "tier", "#blocks", "#bytes", "#hit tokens"});
    for (const StoreRow& row : now.store) {
      page += Row("td", {row.model, row.provenance, row.tier, Number(row.blocks),
                         absl::StrCat("#", Size(row.bytes)), Number(row.hit_tokens)});
    }
    page += "</table>\n";
  }
  page += "<p><a href=\"/metrics\">Metrics</a> · <a href=\"/healthz\">Health</a></p>\n";
  return page + "</body></html>\n";
}

}  // namespace carryover
