// The store, text, sampling and comparing.
#include <memory>

#include "base/status_macros.h"
#include "bench/bench_case.h"
#include "bench/perf_work.h"
#include "bench/simulated_store.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"
#include "kernels/ops.h"

namespace carryover::bench {
namespace {

constexpr int kDepth = SimulatedStore::kDepth;
constexpr int kChains = 20;
constexpr int kVocab = 49152;

absl::Status Expect(bool good, const char* what) {
  return good ? absl::OkStatus() : absl::InternalError(what);
}

// A store with room for so many chains, some of it filled.
absl::StatusOr<std::shared_ptr<SimulatedStore>> Filled(int room, int chains) {
  ASSIGN_OR_RETURN(std::shared_ptr<SimulatedStore> store, SimulatedStore::Create(room * kDepth));
  for (int i = 0; i < chains; ++i) {
    RETURN_IF_ERROR(Expect(store->Insert(i) == kDepth, "a block was not inserted"));
  }
  return store;
}

absl::StatusOr<PerfWork::Body> Insert() {
  ASSIGN_OR_RETURN(const auto store, Filled(2 * kChains, 0));
  return PerfWork::Body([store, chain = 0]() mutable {
    return Expect(store->Insert(chain++) == kDepth, "a block was not inserted");
  });
}

absl::StatusOr<PerfWork::Body> Find() {
  ASSIGN_OR_RETURN(const auto store, Filled(kChains, kChains));
  const auto tokens = std::make_shared<std::vector<int32_t>>(SimulatedStore::Chain(kChains / 2));
  return PerfWork::Body(
      [=] { return Expect(store->Find(*tokens) == kDepth, "a prefix was not found"); });
}

absl::StatusOr<PerfWork::Body> Replace() {
  ASSIGN_OR_RETURN(const auto store, Filled(kChains, kChains));
  return PerfWork::Body([store, chain = kChains]() mutable {
    return Expect(store->EvictUntilFree(kDepth) >= kDepth && store->Insert(chain++) == kDepth,
                  "the full store took nothing in");
  });
}

struct Text {
  std::unique_ptr<const Tokenizer> tokenizer;
  std::string text = SampleText(8192);
  std::vector<int32_t> tokens;
};

absl::StatusOr<std::shared_ptr<const Text>> LoadText(const std::string& model) {
  const auto text = std::make_shared<Text>();
  ASSIGN_OR_RETURN(text->tokenizer, Tokenizer::Load(model));
  ASSIGN_OR_RETURN(text->tokens, text->tokenizer->Encode(text->text, {}));
  return text;
}

absl::StatusOr<PerfWork::Body> Encode(const std::string& model) {
  ASSIGN_OR_RETURN(const auto text, LoadText(model));
  return PerfWork::Body([=] { return text->tokenizer->Encode(text->text, {}).status(); });
}

absl::StatusOr<PerfWork::Body> Decode(const std::string& model) {
  ASSIGN_OR_RETURN(const auto text, LoadText(model));
  return PerfWork::Body([=] {
    const auto decoder = text->tokenizer->NewStreamDecoder(true);
    size_t bytes = 0;
    for (const int32_t token : text->tokens) bytes += decoder->Add(token).size();
    bytes += decoder->Finish().size();
    return Expect(bytes >= text->text.size(), "text was lost");
  });
}

// One token with everything that edits logits, as the engine draws it.
absl::StatusOr<PerfWork::Body> Sample() {
  SamplingParams params;
  params.temperature = 0.8f;
  params.top_p = 0.95f;
  params.top_k = 200;
  params.repetition_penalty = 1.1f;
  const std::vector<int32_t> prompt = SampleTokens(512, kVocab, 1);
  const auto sampler = std::make_shared<Sampler>(params, 1, 0, prompt, std::vector<int32_t>{0});
  const auto logits = std::make_shared<const LogitPairs>(SampleLogitPairs(kVocab));
  return PerfWork::Body([=, position = 0]() mutable {
    std::vector<float> edited = logits->native;
    sampler->Accept(sampler->Sample(absl::MakeSpan(edited), position++));
    return absl::OkStatus();
  });
}

absl::StatusOr<PerfWork::Body> Divergence() {
  ASSIGN_OR_RETURN(Backend * made, CpuOps().create({.threads = 1}));
  const std::shared_ptr<Backend> backend(made, CpuOps().destroy);
  const auto logits = std::make_shared<const LogitPairs>(SampleLogitPairs(kVocab));
  return PerfWork::Body([=] {
    DivergenceRow out;
    DivergenceArgs args;
    args.native = logits->native.data();
    args.carried = logits->carried.data();
    args.rows = 1;
    args.vocab = kVocab;
    args.out = &out;
    CpuOps().divergence(backend.get(), args);
    return CpuOps().sync(backend.get());
  });
}

}  // namespace

void AddStoreWork(std::vector<PerfWork>* works) {
  works->push_back({"store/insert", "block", kDepth, kChains, Insert});
  works->push_back({"store/find", "block", kDepth, kChains, Find});
  works->push_back({"store/replace", "block", kDepth, kChains, Replace});
}

void AddTokenWork(const std::string& model, std::vector<PerfWork>* works) {
  works->push_back({"tokenizer/encode", "KiB", 8, 4, [=] { return Encode(model); }});
  works->push_back({"tokenizer/decode", "KiB", 8, 20, [=] { return Decode(model); }});
  works->push_back({"sampler", "token", 1, 24, Sample});
  works->push_back({"divergence", "row", 1, 24, Divergence});
}

}  // namespace carryover::bench
