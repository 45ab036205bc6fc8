#include "client/eval/item.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/hash.h"
#include "base/status_macros.h"
#include "base/utf8.h"

namespace carryover::eval {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTask = 64;
constexpr size_t kMaxAnswers = 256;
constexpr size_t kMaxAnswerBytes = 64 << 10;
constexpr size_t kMaxStops = 16;
constexpr int kMaxTokens = 1 << 20;

constexpr Metric kMetrics[] = {Metric::kStarts, Metric::kToken,   Metric::kShare, Metric::kQa,
                               Metric::kClass,  Metric::kSummary, Metric::kNone};

// A line and what its errors begin with.
struct Line {
  const Json& json;
  absl::string_view where;

  absl::Status Wrong(absl::string_view field, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", field, " ", what));
  }
  const Json* Find(const char* field) const {
    const auto found = json.find(field);
    return found == json.end() || found->is_null() ? nullptr : &*found;
  }
  absl::StatusOr<std::string> Text(const char* field, bool required) const {
    const Json* value = Find(field);
    if (value == nullptr) {
      if (required) return Wrong(field, "is missing");
      return std::string();
    }
    if (!value->is_string()) return Wrong(field, "must be a string");
    return value->get<std::string>();
  }
  absl::StatusOr<std::vector<std::string>> Texts(const char* field, bool required,
                                                 size_t most) const {
    std::vector<std::string> out;
    const Json* value = Find(field);
    if (value == nullptr) {
      if (required) return Wrong(field, "is missing");
      return out;
    }
    if (!value->is_array()) return Wrong(field, "must be a list of strings");
    if (value->size() > most) return Wrong(field, absl::StrCat("has more than ", most, " entries"));
    for (const Json& entry : *value) {
      if (!entry.is_string()) return Wrong(field, "must be a list of strings");
      out.push_back(entry.get<std::string>());
      if (out.back().size() > kMaxAnswerBytes) {
        return Wrong(field, absl::StrCat("has an entry over ", kMaxAnswerBytes, " bytes"));
      }
      if (out.back().empty()) return Wrong(field, "has an empty entry");
    }
    return out;
  }
  absl::StatusOr<std::optional<int>> Count(const char* field) const {
    const Json* value = Find(field);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_integer() || *value < 1 || *value > kMaxTokens) {
      return Wrong(field, absl::StrCat("must be a whole number from 1 to ", kMaxTokens));
    }
    return value->get<int>();
  }
  absl::StatusOr<std::vector<int32_t>> Ids(const char* field) const {
    std::vector<int32_t> out;
    const Json* value = Find(field);
    if (value == nullptr) return out;
    if (!value->is_array()) return Wrong(field, "must be a list of token ids");
    for (const Json& id : *value) {
      if (!id.is_number_integer() || id < 0 || id > INT32_MAX) {
        return Wrong(field, "must be a list of token ids");
      }
      out.push_back(id.get<int32_t>());
    }
    return out;
  }
};

bool GoodTask(absl::string_view task) {
  return !task.empty() && task.size() <= kMaxTask &&
         std::all_of(task.begin(), task.end(), [](char c) {
           return absl::ascii_isalnum(c) || absl::string_view("-_./:").find(c) != std::string::npos;
         });
}

absl::Status SetTask(const Line& line, const char* field, std::string task, Item* item) {
  if (!GoodTask(task)) {
    return line.Wrong(field,
                      absl::StrCat("must be 1 to ", kMaxTask, " of letters, digits and - _ . / :"));
  }
  item->task = std::move(task);
  return absl::OkStatus();
}

// An id may be a number or a string.
std::string IdOf(const Line& line, const char* field) {
  const Json* value = line.Find(field);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>().substr(0, 256);
  return value->is_number_integer() ? value->dump() : "";
}

absl::StatusOr<Item> ParseOurs(const Line& line) {
  Item item;
  item.id = IdOf(line, "id");
  ASSIGN_OR_RETURN(std::string task, line.Text("task", true));
  RETURN_IF_ERROR(SetTask(line, "task", std::move(task), &item));
  ASSIGN_OR_RETURN(item.prefix_ids, line.Ids("prefix_tokens"));
  ASSIGN_OR_RETURN(item.suffix_ids, line.Ids("suffix_tokens"));
  const bool ids = item.has_ids();
  ASSIGN_OR_RETURN(item.prefix, line.Text("prefix", !ids));
  ASSIGN_OR_RETURN(item.suffix, line.Text("suffix", false));
  if (!ids && item.prefix.empty()) return line.Wrong("prefix", "is empty");
  if (ids && item.suffix_ids.empty()) return line.Wrong("suffix_tokens", "is missing");
  ASSIGN_OR_RETURN(item.answers, line.Texts("answers", false, kMaxAnswers));
  ASSIGN_OR_RETURN(item.classes, line.Texts("classes", false, kMaxAnswers));
  ASSIGN_OR_RETURN(item.stop, line.Texts("stop", false, kMaxStops));
  ASSIGN_OR_RETURN(item.max_tokens, line.Count("max_tokens"));
  ASSIGN_OR_RETURN(item.label, line.Text("label", false));
  ASSIGN_OR_RETURN(const std::string metric, line.Text("metric", false));
  item.metric = item.answers.empty() ? Metric::kNone : Metric::kStarts;
  if (!metric.empty()) {
    const auto* found = std::find_if(std::begin(kMetrics), std::end(kMetrics),
                                     [&](Metric m) { return metric == MetricName(m); });
    if (found == std::end(kMetrics)) {
      return line.Wrong("metric", "must be starts, token, share, qa, class, summary or none");
    }
    item.metric = *found;
  }
  if (item.metric != Metric::kNone && item.answers.empty()) {
    return line.Wrong("answers", absl::StrCat("is empty, and metric is ", MetricName(item.metric)));
  }
  return item;
}

Metric LongBenchMetric(absl::string_view dataset) {
  for (const char* name : {"gov_report", "qmsum", "multi_news", "samsum", "vcsum"}) {
    if (absl::StrContains(dataset, name)) return Metric::kSummary;
  }
  for (const char* name : {"trec", "lsht"}) {
    if (absl::StrContains(dataset, name)) return Metric::kClass;
  }
  for (const char* name : {"passage_count", "passage_retrieval"}) {
    if (absl::StrContains(dataset, name)) return Metric::kStarts;
  }
  for (const char* name : {"lcc", "repobench"}) {  // scored by edits of code there
    if (absl::StrContains(dataset, name)) return Metric::kNone;
  }
  return Metric::kQa;
}

absl::StatusOr<Item> ParseLongBench(const Line& line, absl::string_view stem) {
  Item item;
  item.id = IdOf(line, "_id");
  ASSIGN_OR_RETURN(std::string dataset, line.Text("dataset", false));
  if (dataset.empty()) dataset = std::string(stem);
  RETURN_IF_ERROR(SetTask(line, "dataset", dataset, &item));
  ASSIGN_OR_RETURN(const std::string context, line.Text("context", true));
  ASSIGN_OR_RETURN(const std::string input, line.Text("input", true));
  ASSIGN_OR_RETURN(item.answers, line.Texts("answers", true, kMaxAnswers));
  ASSIGN_OR_RETURN(item.classes, line.Texts("all_classes", false, kMaxAnswers));
  if (context.empty()) return line.Wrong("context", "is empty");
  item.metric = LongBenchMetric(dataset);
  if (item.answers.empty() && item.metric != Metric::kNone) {
    return line.Wrong("answers", "is empty");
  }
  item.prefix = absl::StrCat("Read the text and answer the question.\n\n", context);
  item.suffix = input.empty() ? "\n\nSummary:" : absl::StrCat("\n\nQuestion: ", input, "\nAnswer:");
  item.max_tokens = item.metric == Metric::kSummary ? 128 : 32;
  if (item.metric != Metric::kSummary) item.stop = {"\n"};
  return item;
}

absl::StatusOr<Item> ParseRuler(const Line& line, absl::string_view stem) {
  Item item;
  item.id = IdOf(line, "index");
  RETURN_IF_ERROR(SetTask(line, "the file's name", std::string(stem), &item));
  ASSIGN_OR_RETURN(std::string input, line.Text("input", true));
  ASSIGN_OR_RETURN(item.answers, line.Texts("outputs", true, kMaxAnswers));
  ASSIGN_OR_RETURN(const std::string lead, line.Text("answer_prefix", false));
  if (item.answers.empty()) return line.Wrong("outputs", "is empty");
  if (!lead.empty() && !absl::EndsWith(input, lead)) input += lead;
  const size_t last = input.find_last_not_of(" \t\r\n");
  const size_t cut = last == std::string::npos ? std::string::npos : input.rfind('\n', last);
  if (cut == std::string::npos || cut == 0) {
    return line.Wrong("input", "needs a line with the question after the text");
  }
  item.prefix = input.substr(0, cut);
  item.suffix = input.substr(cut);
  item.metric = Metric::kShare;
  item.max_tokens = 64;
  return item;
}

}  // namespace

const char* MetricName(Metric metric) {
  switch (metric) {
    case Metric::kStarts:
      return "starts";
    case Metric::kToken:
      return "token";
    case Metric::kShare:
      return "share";
    case Metric::kQa:
      return "qa";
    case Metric::kClass:
      return "class";
    case Metric::kSummary:
      return "summary";
    case Metric::kNone:
      return "none";
  }
  return "none";
}

absl::StatusOr<Item> ParseItem(absl::string_view text, absl::string_view where,
                               absl::string_view stem) {
  if (text.size() > kMaxLineBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": the line is over ", kMaxLineBytes >> 20, " MiB"));
  }
  if (FirstInvalidUtf8(text) != text.size())
    return absl::InvalidArgumentError(absl::StrCat(where, ": not UTF-8"));
  // Items are flat; the depth is bounded before the parser, which recurses, sees it.
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      quoted = c != '"';
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  if (deepest > 16) return absl::InvalidArgumentError(absl::StrCat(where, ": nested too deeply"));
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": not a JSON object"));
  }
  const Line line{json, where};
  const auto has = [&](const char* field) { return line.Find(field) != nullptr; };
  absl::StatusOr<Item> item;
  if (has("task") || has("prefix") || has("prefix_tokens")) {
    item = ParseOurs(line);
  } else if (has("context") && has("input")) {
    item = ParseLongBench(line, stem);
  } else if (has("outputs") && has("input")) {
    item = ParseRuler(line, stem);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat(where,
                     ": task is missing (nor is it LongBench's {input, context, answers} or "
                     "RULER's {input, outputs})"));
  }
  if (item.ok() && item->id.empty()) {
    // Without the folder: the same file elsewhere holds the same items.
    item->id = absl::StrCat(stem, ":", where.substr(where.rfind(':') + 1));
  }
  return item;
}

absl::StatusOr<std::vector<Item>> ReadItems(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  std::string stem = path.substr(path.find_last_of('/') + 1);
  stem = stem.substr(0, stem.find_last_of('.'));
  std::vector<Item> items;
  std::string line;
  int64_t number = 1;
  const auto take = [&]() -> absl::Status {
    const std::string where = absl::StrCat(path, ":", number);
    if (absl::StripAsciiWhitespace(line).empty()) return absl::OkStatus();
    if (items.size() == kMaxItems) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": more than ", kMaxItems, " items"));
    }
    ASSIGN_OR_RETURN(Item item, ParseItem(line, where, stem));
    items.push_back(std::move(item));
    return absl::OkStatus();
  };
  std::vector<char> buffer(1 << 16);
  while (file.read(buffer.data(), buffer.size()) || file.gcount() > 0) {
    for (std::streamsize i = 0; i < file.gcount(); ++i) {
      if (buffer[i] == '\n') {
        RETURN_IF_ERROR(take());
        line.clear();
        ++number;
      } else {
        line += buffer[i];
        // Cut short here: what is over the bound is never kept.
        if (line.size() > kMaxLineBytes) RETURN_IF_ERROR(take());
      }
    }
  }
  if (file.bad()) return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  RETURN_IF_ERROR(take());
  if (items.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no items"));
  return items;
}

nlohmann::ordered_json ItemToJson(const Item& item) {
  nlohmann::ordered_json json = {{"id", item.id}, {"task", item.task}};
  json["metric"] = MetricName(item.metric);
  if (item.has_ids()) {
    json["prefix_tokens"] = item.prefix_ids;
    json["suffix_tokens"] = item.suffix_ids;
  } else {
    json["prefix"] = item.prefix;
    json["suffix"] = item.suffix;
  }
  json["answers"] = item.answers;
  if (!item.classes.empty()) json["classes"] = item.classes;
  if (!item.stop.empty()) json["stop"] = item.stop;
  if (item.max_tokens) json["max_tokens"] = *item.max_tokens;
  if (!item.label.empty()) json["label"] = item.label;
  return json;
}

std::string ItemKey(const Item& item) { return ToHex(Sha256(ItemToJson(item).dump())); }

std::string PrefixKey(const Item& item) {
  return ToHex(Sha256(item.has_ids() ? absl::StrJoin(item.prefix_ids, ",") : item.prefix));
}

}  // namespace carryover::eval
