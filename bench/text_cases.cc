// Tokenizer and divergence: what surrounds a model's passes.
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/bench_case.h"
#include "engine/tokenizer.h"
#include "kernels/ops.h"

namespace carryover::bench {
namespace {

absl::StatusOr<nlohmann::json> Encode(const Settings& settings) {
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(settings.source));
  const std::string text = SampleText(size_t{1} << 20);
  size_t tokens = 0;
  absl::Status status;
  const std::vector<double> encode = Repeat(settings.repeats, [&] {
    const auto ids = tokenizer->Encode(text, {});
    status.Update(ids.status());
    if (ids.ok()) tokens = ids->size();
  });
  RETURN_IF_ERROR(status);
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer->Encode(text, {}));
  size_t decoded = 0;
  const std::vector<double> decode = Repeat(settings.repeats, [&] {
    const auto decoder = tokenizer->NewStreamDecoder(true);
    decoded = 0;
    for (const int32_t id : ids) decoded += decoder->Add(id).size();
    decoded += decoder->Finish().size();
  });
  const double megabytes = static_cast<double>(text.size()) * 1e-6;
  return nlohmann::json{{"bytes", text.size()},
                        {"tokens", tokens},
                        {"encode_mbytes_per_s", megabytes / (QuartilesOf(encode).median * 1e-3)},
                        {"stream_decode_mbytes_per_s", static_cast<double>(decoded) * 1e-6 /
                                                           (QuartilesOf(decode).median * 1e-3)}};
}

absl::StatusOr<nlohmann::json> Divergence(const Settings& settings, int rows, int vocab) {
  const Ops& ops = CpuOps();
  ASSIGN_OR_RETURN(Backend * backend, ops.create({.threads = settings.threads}));
  const std::unique_ptr<Backend, void (*)(Backend*)> owner(backend, ops.destroy);
  const LogitPairs logits = SampleLogitPairs(static_cast<size_t>(rows) * vocab);
  std::vector<DivergenceRow> out(rows);
  DivergenceArgs args;
  args.native = logits.native.data();
  args.carried = logits.carried.data();
  args.rows = rows;
  args.vocab = vocab;
  args.out = out.data();
  absl::Status status;
  const std::vector<double> times = Repeat(settings.repeats, [&] {
    ops.divergence(backend, args);
    status.Update(ops.sync(backend));
  });
  RETURN_IF_ERROR(status);
  nlohmann::json json = {{"rows", rows}, {"vocab", vocab}};
  AddQuartiles("ms", times, &json);
  json["gbytes_per_s"] =  // of both rows of logits, counted once
      8e-9 * static_cast<double>(logits.native.size()) / (QuartilesOf(times).median * 1e-3);
  return json;
}

}  // namespace

void AddTextCases(const Settings& settings, std::vector<Case>* cases) {
  cases->push_back(
      {"tokenizer", "text to tokens and back, one thread", 0, [=] { return Encode(settings); }});
  for (const int rows : {1, 16}) {
    cases->push_back({absl::StrCat("divergence/rows=", rows), "two rows of logits compared", 0,
                      [=] { return Divergence(settings, rows, 49152); }});
  }
}

}  // namespace carryover::bench
