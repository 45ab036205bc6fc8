// The sample op: the rules of host_sample.h, a row a thread.
#include "absl/strings/str_cat.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/for_rows.h"
#include "kernels/host_sample.h"

namespace carryover::cpu {

void Sample(Backend* backend, const SampleArgs& args) {
  if (args.rows.empty()) return;
  if (args.vocab <= 0) {
    backend->status.Update(
        absl::InvalidArgumentError(absl::StrCat("sample of rows of ", args.vocab, " logits")));
    return;
  }
  constexpr size_t kWork = 4;  // an exponential a logit, mostly
  ForRows(backend->pool, static_cast<int>(args.rows.size()),
          kWork * static_cast<size_t>(args.vocab), [&](int r) {
            const SampleSpec& spec = args.rows[r];
            const absl::Span<float> logits(
                args.logits + static_cast<int64_t>(spec.row) * args.vocab, args.vocab);
            SampledToken& out = args.out[r];
            out.token =
                SampleRow(logits, spec, args.edits.subspan(spec.edit_begin, spec.edit_count));
            if (spec.logprobs < 0) return;
            const RankedToken ranked =
                RankToken(logits, out.token, std::min(spec.logprobs, kSampleTop));
            out.rank = ranked.rank;
            out.logprob = static_cast<float>(logits[out.token] - ranked.log_sum_exp);
            out.top_count = static_cast<int32_t>(ranked.top.size());
            for (size_t i = 0; i < ranked.top.size(); ++i) {
              out.top[i] = ranked.top[i];
              out.top_logprob[i] = static_cast<float>(logits[ranked.top[i]] - ranked.log_sum_exp);
            }
          });
}

}  // namespace carryover::cpu
