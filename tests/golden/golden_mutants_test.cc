// Models that are wrong in one way each must fail the comparison with the reference by a wide
// margin, or the comparison is blind to that way of being wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/golden/golden_reference.h"
#include "tests/golden/golden_runner.h"

namespace carryover {
namespace {

using nlohmann::json;

constexpr double kTolerance = 1e-4;  // of the golden test, times the standard deviation
constexpr double kCaughtBy = 100;    // a mutant is further off than this many tolerances

// Functions that replace one entry of CpuOps().
void RopeWithoutQkNorm(Backend* backend, const RopeWriteArgs& args) {
  RopeWriteArgs changed = args;
  changed.q_norm = changed.k_norm = nullptr;
  CpuOps().rope_write(backend, changed);
}

thread_local int pass_rows = 0;

void BeginPassCountingRows(Backend* backend, const PassLayout& layout) {
  pass_rows = static_cast<int>(layout.positions.size());
  CpuOps().begin_pass(backend, layout);
}

// The two halves of every query and key change places: the rotation turns the other way.
void RopeWithSwappedHalves(Backend* backend, const RopeWriteArgs& args) {
  const KvGeometry& geometry = args.geometry;
  const int row = (args.heads + 2 * geometry.kv_heads) * geometry.head_dim;
  for (int r = 0; r < pass_rows; ++r) {
    for (int h = 0; h < args.heads + geometry.kv_heads; ++h) {
      float* head = args.qkv + int64_t{r} * row + h * geometry.head_dim;
      std::swap_ranges(head, head + geometry.head_dim / 2, head + geometry.head_dim / 2);
    }
  }
  CpuOps().rope_write(backend, args);
}

template <int kDelta>
void AttentionWithWindowOff(Backend* backend, const AttentionArgs& args) {
  AttentionArgs changed = args;
  if (changed.window != 0) changed.window += kDelta;
  CpuOps().attention(backend, changed);
}

void AttentionWithoutWindow(Backend* backend, const AttentionArgs& args) {
  AttentionArgs changed = args;
  changed.window = 0;
  CpuOps().attention(backend, changed);
}

void AttentionUnscaled(Backend* backend, const AttentionArgs& args) {
  AttentionArgs changed = args;
  changed.scale = 1;
  CpuOps().attention(backend, changed);
}

absl::StatusOr<PackedMatrix*> PackWithoutBias(Backend* backend, absl::Span<const HostMatrix> parts,
                                              absl::Span<const float> bias, DType type,
                                              bool gated) {
  return CpuOps().pack(backend, parts, {}, type, gated);
}

absl::StatusOr<PackedMatrix*> PackInReverse(Backend* backend, absl::Span<const HostMatrix> parts,
                                            absl::Span<const float> bias, DType type, bool gated) {
  std::vector<HostMatrix> reversed(parts.begin(), parts.end());
  if (reversed.size() == 2) std::swap(reversed[0], reversed[1]);  // up before gate
  return CpuOps().pack(backend, reversed, bias, type, gated);
}

void NormWithEpsilonOff(Backend* backend, const float* x, const float* weight, int rows, int dim,
                        float eps, void* out, DType out_type) {
  CpuOps().rms_norm(backend, x, weight, rows, dim, eps + 0.05f, out, out_type);
}

struct Mutant {
  const char* name;
  std::vector<const char*> models;           // those whose comparison must notice
  std::function<void(Ops*)> change_ops;      // or
  std::function<void(json*)> change_config;  // both may be null
};

const std::vector<Mutant>& Mutants() {
  static const std::vector<Mutant>* const mutants = new std::vector<Mutant>{
      {"wrong_rope_base",
       {"llama3", "llama_linear", "llama2", "smollm2", "mistral", "qwen2", "qwen3"},
       nullptr,
       [](json* config) {
         json& holder =
             config->contains("rope_parameters") ? (*config)["rope_parameters"] : *config;
         holder["rope_theta"] = holder["rope_theta"].get<double>() * 1.02;
       }},
      {"missing_qk_norm",
       {"qwen3"},
       [](Ops* ops) { ops->rope_write = RopeWithoutQkNorm; },
       nullptr},
      {"swapped_halves",
       {"llama3", "llama_linear", "llama2", "smollm2", "mistral", "qwen2", "qwen3"},
       [](Ops* ops) {
         ops->begin_pass = BeginPassCountingRows;
         ops->rope_write = RopeWithSwappedHalves;
       },
       nullptr},
      {"window_one_short",
       {"mistral", "qwen2"},
       [](Ops* ops) { ops->attention = AttentionWithWindowOff<-1>; },
       nullptr},
      {"window_one_long",
       {"mistral", "qwen2"},
       [](Ops* ops) { ops->attention = AttentionWithWindowOff<1>; },
       nullptr},
      {"no_window",
       {"mistral", "qwen2"},
       [](Ops* ops) { ops->attention = AttentionWithoutWindow; },
       nullptr},
      {"window_in_every_layer",
       {"qwen2"},
       nullptr,
       [](json* config) {
         (*config)["layer_types"] =
             json::array({"sliding_attention", "sliding_attention", "sliding_attention"});
       }},
      {"wrong_linear_factor",
       {"llama_linear"},
       nullptr,
       [](json* config) { (*config)["rope_scaling"]["factor"] = 4.1; }},
      {"no_linear_scaling",
       {"llama_linear"},
       nullptr,
       [](json* config) { (*config)["rope_scaling"] = nullptr; }},
      {"wrong_llama3_factor",
       {"llama3"},
       nullptr,
       [](json* config) { (*config)["rope_parameters"]["factor"] = 7.0; }},
      {"no_llama3_scaling",
       {"llama3"},
       nullptr,
       [](json* config) { (*config)["rope_parameters"]["rope_type"] = "default"; }},
      {"wrong_llama3_blend",
       {"llama3"},
       nullptr,
       [](json* config) { (*config)["rope_parameters"]["high_freq_factor"] = 4.5; }},
      {"unscaled_attention",
       {"llama3", "llama_linear", "llama2", "smollm2", "mistral", "qwen2", "qwen3"},
       [](Ops* ops) { ops->attention = AttentionUnscaled; },
       nullptr},
      {"missing_bias",
       {"llama_linear", "qwen2"},
       [](Ops* ops) { ops->pack = PackWithoutBias; },
       nullptr},
      {"gate_and_up_swapped",
       {"llama3", "llama_linear", "llama2", "smollm2", "mistral", "qwen2", "qwen3"},
       [](Ops* ops) { ops->pack = PackInReverse; },
       nullptr},
      {"wrong_epsilon",
       {"llama3", "llama_linear", "llama2", "smollm2", "mistral", "qwen2", "qwen3"},
       [](Ops* ops) { ops->rms_norm = NormWithEpsilonOff; },
       nullptr},
      // Not a mutant: what the harness itself does must not be what is caught.
      {"nothing", {"llama3", "mistral", "qwen2", "qwen3"}, nullptr, nullptr},
  };
  return *mutants;
}

// The largest distance of any prompt's logits from the reference, in standard deviations.
double Distance(const Mutant& mutant, const std::string& model) {
  const std::string source = std::string(CARRYOVER_SOURCE_DIR) + "/tests/golden/tiny/" + model;
  const std::string folder = testing::TempDir() + "/mutant_" + mutant.name + "_" + model;
  std::filesystem::remove_all(folder);
  std::filesystem::copy(source, folder);
  if (mutant.change_config != nullptr) {
    json config = json::parse(std::ifstream(source + "/config.json"));
    mutant.change_config(&config);
    std::ofstream(folder + "/config.json") << config;
  }
  static Ops ops;  // outlives the models that use it
  ops = CpuOps();
  if (mutant.change_ops != nullptr) mutant.change_ops(&ops);

  double worst = 0;
  const auto reference = LoadGoldenReference(model);
  const auto runner =
      GoldenRunner::Load(folder, ops, {.weights = DType::kF32, .kv_dtype = DType::kF32});
  EXPECT_TRUE(reference.ok()) << reference.status();
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (reference.ok() && runner.ok()) {
    const int vocab = (*runner)->model().config().vocab;
    for (const GoldenPrompt& prompt : reference->prompts) {
      const double distance = MaxDistance(prompt, (*runner)->Run(prompt.tokens, 0), vocab);
      worst = std::max(worst, distance / reference->std);
    }
  }
  std::filesystem::remove_all(folder);
  return worst;
}

class GoldenMutant : public testing::TestWithParam<size_t> {};

TEST_P(GoldenMutant, IsCaught) {
  const Mutant& mutant = Mutants()[GetParam()];
  const bool broken = mutant.change_ops != nullptr || mutant.change_config != nullptr;
  for (const char* model : mutant.models) {
    const double distance = Distance(mutant, model);
    std::printf("%s of %s: max |delta| / std = %.2e\n", mutant.name, model, distance);
    if (broken) {
      EXPECT_GT(distance, kCaughtBy * kTolerance) << mutant.name << " of " << model;
    } else {
      EXPECT_LE(distance, kTolerance) << mutant.name << " of " << model;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Each, GoldenMutant, testing::Range<size_t>(0, Mutants().size()),
                         [](const auto& info) { return std::string(Mutants()[info.param].name); });

}  // namespace
}  // namespace carryover
