#include "models/causal_lm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <utility>

#include "core/device.h"

namespace vlscope {
namespace {

constexpr int kNextTokenProbs = 1;  // Slot beside the logits.

/// Index of the last token of each prompt.
at::Tensor last_tokens(const at::Tensor& attention_mask) {
  const std::int64_t seq = attention_mask.size(1);
  return (attention_mask * at::arange(seq)).argmax(1);
}

at::Tensor rows_at(const at::Tensor& x, const at::Tensor& index) {
  const at::Tensor batch = at::arange(x.size(0), x.options().dtype(at::kLong));
  return x.index({batch, on_device(index, x.device())});
}

/// The last `keep` positions; all for 0.
at::Tensor kept(const at::Tensor& hidden, std::int64_t keep) {
  const std::int64_t seq = hidden.size(1);
  return hidden.slice(1, keep == 0 ? 0 : std::max<std::int64_t>(seq - keep, 0));
}

}  // namespace

CausalLM::CausalLM(const Config& config)
    : Module(nullptr, "", kinds::causal_lm),
      lm_head(this, "lm_head", config.text.hidden_size, config.text.vocab_size, false),
      config_(config) {}

Flow<at::Tensor> CausalLM::forward(Trace& trace, Inputs inputs) const {
  const bool edited =
      co_await trace.at(input, inputs.input_ids, inputs.attention_mask, inputs.pixel_values,
                        inputs.pixel_values_videos, inputs.image_grid_thw, inputs.video_grid_thw,
                        inputs.second_per_grid_ts);
  if (edited) inputs = checked(inputs, config_);
  at::Tensor hidden = co_await hidden_states(trace, inputs);
  at::Tensor result = co_await head(trace, std::move(hidden), inputs);
  co_await trace.at(output, result);
  co_return result;
}

// The next token needs one row of the head's work; only a reader of the logits (or of what lies
// behind them) pays for all rows. Probabilities of logits that the reader has changed come from
// those.
Flow<at::Tensor> CausalLM::head(Trace& trace, at::Tensor hidden, const Inputs& inputs) const {
  const std::int64_t positions = inputs.attention_mask.size(1);
  const at::Tensor last = last_tokens(inputs.attention_mask);
  hidden = moved(hidden, lm_head.device());
  at::Tensor scores, probs;
  bool edited = trace.skips(lm_head);
  do {
    const bool wants_probs = trace.wants(lm_head.output, kNextTokenProbs);
    if (!scores.defined() && (edited || !wants_probs)) {
      scores = kept(hidden, inputs.logits_to_keep);
      co_await trace.at(lm_head.input, scores);
      if (!trace.skip(lm_head, scores)) scores = lm_head.apply(scores);
    }
    if (wants_probs || trace.listing()) {
      const at::Tensor rows =
          edited ? rows_at(scores, last - (positions - scores.size(1)))
                 : lm_head.apply(rows_at(hidden, last - (positions - hidden.size(1))));
      probs = at::softmax(rows, -1);
    }
    edited |= co_await trace.on_demand(lm_head.output, scores, probs);
  } while (trace.asked_again());
  if (!scores.defined()) scores = lm_head.apply(kept(hidden, inputs.logits_to_keep));
  co_return scores;
}

at::Tensor CausalLM::project_on_vocab(const at::Tensor& hidden) const {
  const Leaf& norm = final_norm();
  return lm_head.apply(moved(norm.apply(moved(hidden, norm.device())), lm_head.device()));
}

}  // namespace vlscope
