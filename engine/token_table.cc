#include "engine/token_table.h"

#include <utility>

namespace carryover {
namespace {

class TableStreamDecoder : public StreamDecoder {
 public:
  TableStreamDecoder(const TokenTable& table, bool skip_special)
      : table_(table), skip_special_(skip_special), run_(table.decoder.NewRun()) {}

  std::string Add(int32_t token) override {
    std::string text;
    if (table_.Contains(token) && !(skip_special_ && table_.special[token])) {
      run_->Push(table_.spellings[token], &text);
    }
    return text;
  }

  std::string Finish() override {
    std::string text;
    run_->Finish(&text);
    return text;
  }

 private:
  const TokenTable& table_;
  const bool skip_special_;
  const std::unique_ptr<DecodeRun> run_;
};

}  // namespace

void TokenTable::Set(int32_t id, const std::string& spelling, bool is_special) {
  if (static_cast<size_t>(id) >= spellings.size()) {
    spellings.resize(id + 1);
  }
  special.resize(spellings.size());
  spellings[id] = spelling;
  special[id] = is_special;
}

std::string TokenTable::Decode(absl::Span<const int32_t> tokens, bool skip_special) const {
  const std::unique_ptr<DecodeRun> run = decoder.NewRun();
  std::string text;
  for (const int32_t token : tokens) {
    if (!Contains(token) || (skip_special && special[token])) continue;
    run->Push(spellings[token], &text);
  }
  run->Finish(&text);
  return text;
}

std::unique_ptr<StreamDecoder> TokenTable::NewStreamDecoder(bool skip_special) const {
  return std::make_unique<TableStreamDecoder>(*this, skip_special);
}

}  // namespace carryover
