#include "engine/bpe.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "engine/byte_level.h"

namespace carryover {
namespace {

// Words up to this many symbols are merged by looking at all pairs, longer ones through a heap.
constexpr size_t kShortWord = 64;
constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

absl::StatusOr<Bpe> Bpe::Parse(const JsonValue& model, bool bytes) {
  if (!model.IsObject()) return model.Error("an object is needed");
  // Files older than the field have a BPE's merges.
  ASSIGN_OR_RETURN(const std::string type, model.Field("type").StringOr("BPE"));
  if (type != "BPE") {
    return model.Field("type").Error(absl::StrCat("\"", type, "\" is not supported, only \"BPE\""));
  }
  Bpe bpe;
  bpe.bytes_ = bytes;
  RETURN_IF_ERROR(bpe.ParseVocabulary(model.Field("vocab")));
  RETURN_IF_ERROR(bpe.ParseMerges(model.Field("merges")));
  RETURN_IF_ERROR(bpe.ParseOptions(model));
  return bpe;
}

absl::Status Bpe::ParseVocabulary(const JsonValue& json) {
  if (!json.IsObject() || json.json->empty()) return json.Error("an object with tokens is needed");
  const int64_t max_id = MaxId(json.size());
  int64_t largest = 0;
  for (const auto& [token, id] : json.json->items()) {
    ASSIGN_OR_RETURN(const int64_t value,
                     (JsonValue{&id, absl::StrCat(json.path, "[\"", token, "\"]")}.Int(0, max_id)));
    largest = std::max(largest, value);
  }
  tokens_.resize(largest + 1);
  std::vector<bool> taken(tokens_.size());
  ids_.reserve(json.size());
  for (const auto& [token, id] : json.json->items()) {
    const int32_t value = id.get<int32_t>();
    if (taken[value]) {
      return json.Error(
          absl::StrCat("\"", tokens_[value], "\" and \"", token, "\" have the same id ", value));
    }
    taken[value] = true;
    tokens_[value] = token;
    ids_.emplace(tokens_[value], value);
  }
  byte_ids_.resize(256);
  for (int byte = 0; byte < 256; ++byte) byte_ids_[byte] = Find(ByteCharacters()[byte]);
  all_bytes_ = std::count(byte_ids_.begin(), byte_ids_.end(), -1) == 0;
  return absl::OkStatus();
}

absl::Status Bpe::ParseMerges(const JsonValue& json) {
  if (!json.IsArray()) return json.Error("an array is needed");
  merges_.reserve(json.size());
  std::string joined;
  for (size_t i = 0; i < json.size(); ++i) {
    const nlohmann::json& item = (*json.json)[i];
    absl::string_view left, right;
    if (item.is_string()) {
      const absl::string_view text = item.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == absl::string_view::npos ||
          text.find(' ', space + 1) != absl::string_view::npos) {
        return json.Element(i).Error("two tokens with a space between are needed");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      left = item[0].get_ref<const std::string&>();
      right = item[1].get_ref<const std::string&>();
    } else {
      return json.Element(i).Error("a pair of tokens is needed");
    }
    joined.assign(left.data(), left.size());
    joined.append(right.data(), right.size());
    for (const absl::string_view token : {left, right, absl::string_view(joined)}) {
      if (Find(token) < 0) {
        return json.Element(i).Error(absl::StrCat("\"", token, "\" is not in the vocabulary"));
      }
    }
    // Where a pair is listed twice, the reference goes by the last rank.
    merges_[PairKey(Find(left), Find(right))] = {static_cast<uint32_t>(i), Find(joined)};
  }
  return absl::OkStatus();
}

absl::Status Bpe::ParseOptions(const JsonValue& model) {
  const JsonValue dropout = model.Field("dropout");
  if (!dropout.IsNull() && !(dropout.json->is_number() && dropout.json->get<double>() == 0)) {
    return dropout.Error("is not supported: it makes encoding random");
  }
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    ASSIGN_OR_RETURN(const std::string affix, model.Field(name).StringOr(""));
    if (!affix.empty()) return model.Field(name).Error("is not supported");
  }
  ASSIGN_OR_RETURN(ignore_merges_, model.Field("ignore_merges").BoolOr(false));
  ASSIGN_OR_RETURN(fuse_unk_, model.Field("fuse_unk").BoolOr(false));
  ASSIGN_OR_RETURN(const std::string unk, model.Field("unk_token").StringOr(""));
  if (!unk.empty()) {
    unk_id_ = Find(unk);
    if (unk_id_ < 0) {
      return model.Field("unk_token").Error(absl::StrCat("\"", unk, "\" is not in the vocabulary"));
    }
  }
  ASSIGN_OR_RETURN(const bool byte_fallback, model.Field("byte_fallback").BoolOr(false));
  if (byte_fallback) {
    for (int byte = 0; byte < 256; ++byte) {
      fallback_ids_.push_back(Find(absl::StrFormat("<0x%02X>", byte)));
    }
  }
  return absl::OkStatus();
}

int32_t Bpe::Find(absl::string_view token) const {
  const auto it = ids_.find(token);
  return it == ids_.end() ? -1 : it->second;
}

void Bpe::Encode(absl::string_view word, std::vector<int32_t>* ids) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    const int32_t whole = bytes_ ? Find(BytesToCharacters(word)) : Find(word);
    if (whole >= 0) {
      ids->push_back(whole);
      return;
    }
  }
  const size_t from = ids->size();
  if (bytes_ && all_bytes_) {
    for (const char c : word) ids->push_back(byte_ids_[static_cast<uint8_t>(c)]);
  } else if (bytes_) {
    FirstSymbols(BytesToCharacters(word), ids);
  } else {
    FirstSymbols(word, ids);
  }
  if (ids->size() - from <= kShortWord) {
    MergeShort(ids, from);
  } else {
    MergeLong(ids, from);
  }
}

void Bpe::FirstSymbols(absl::string_view characters, std::vector<int32_t>* symbols) const {
  bool unknown = false;  // an unknown token waits, so that those after it can join it
  const auto flush = [&] {
    if (unknown) symbols->push_back(unk_id_);
    unknown = false;
  };
  for (size_t at = 0; at < characters.size();) {
    size_t end = at + 1;
    while (end < characters.size() && (characters[end] & 0xC0) == 0x80) ++end;
    const absl::string_view character = characters.substr(at, end - at);
    at = end;
    const int32_t id = Find(character);
    if (id >= 0) {
      flush();
      symbols->push_back(id);
      continue;
    }
    if (!fallback_ids_.empty() && std::all_of(character.begin(), character.end(), [&](char c) {
          return fallback_ids_[static_cast<uint8_t>(c)] >= 0;
        })) {
      // As in the reference, an unknown token that waits goes on waiting.
      for (const char c : character) symbols->push_back(fallback_ids_[static_cast<uint8_t>(c)]);
      continue;
    }
    if (unk_id_ < 0) continue;  // nothing stands for it: the reference leaves it out
    if (!fuse_unk_) flush();
    unknown = true;
  }
  flush();
}

void Bpe::MergeShort(std::vector<int32_t>* ids, size_t from) const {
  size_t n = ids->size() - from;
  int32_t* symbols = ids->data() + from;
  Merge pairs[kShortWord];  // of symbols i and i + 1
  const auto look = [&](size_t i) {
    const auto it = merges_.find(PairKey(symbols[i], symbols[i + 1]));
    pairs[i] = it == merges_.end() ? Merge{kNoRank, -1} : it->second;
  };
  for (size_t i = 0; i + 1 < n; ++i) look(i);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].rank == kNoRank) break;
    symbols[best] = pairs[best].id;
    for (size_t i = best + 1; i + 1 < n; ++i) {
      symbols[i] = symbols[i + 1];
      pairs[i] = pairs[i + 1];
    }
    --n;
    if (best > 0) look(best - 1);
    if (best + 1 < n) look(best);
  }
  ids->resize(from + n);
}

void Bpe::MergeLong(std::vector<int32_t>* ids, size_t from) const {
  struct Symbol {
    int32_t id;              // -1 once it was joined to the one before it
    int32_t previous, next;  // -1 at the ends
  };
  struct Candidate {
    uint32_t rank;
    int32_t at;  // the left symbol
    int32_t id;  // what the pair becomes
    // A heap's top is its largest: the first rank, then the leftmost.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const int32_t n = static_cast<int32_t>(ids->size() - from);
  std::vector<Symbol> symbols(n);
  for (int32_t i = 0; i < n; ++i) {
    symbols[i] = {(*ids)[from + i], i - 1, i + 1 < n ? i + 1 : -1};
  }
  const auto find = [&](int32_t at) -> const Merge* {
    if (at < 0 || symbols[at].next < 0) return nullptr;
    const auto it = merges_.find(PairKey(symbols[at].id, symbols[symbols[at].next].id));
    return it == merges_.end() ? nullptr : &it->second;
  };
  std::vector<Candidate> heap;
  for (int32_t i = 0; i + 1 < n; ++i) {
    if (const Merge* merge = find(i)) heap.push_back({merge->rank, i, merge->id});
  }
  std::make_heap(heap.begin(), heap.end());
  const auto push = [&](int32_t at) {
    if (const Merge* merge = find(at)) {
      heap.push_back({merge->rank, at, merge->id});
      std::push_heap(heap.begin(), heap.end());
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = symbols[top.at];
    if (left.id < 0) continue;
    // The pair may have changed since it was pushed.
    const Merge* merge = find(top.at);
    if (merge == nullptr || merge->id != top.id) continue;
    Symbol& right = symbols[left.next];
    left.id = top.id;
    right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[left.next].previous = top.at;
    push(left.previous);
    push(top.at);
  }
  size_t out = from;
  for (int32_t at = 0; at >= 0; at = symbols[at].next) (*ids)[out++] = symbols[at].id;
  ids->resize(out);
}

}  // namespace carryover
