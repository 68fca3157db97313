#include "models/text/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>

#include <cmath>
#include <utility>

#include "core/device.h"
#include "core/ops/precision.h"
#include "core/ops/rotary.h"
#include "core/ops/torch_ops.h"

namespace vlscope {
namespace {

/// The first `past` positions of `held`, the same in every row of the batch, and behind them `x`.
at::Tensor behind(const at::Tensor& held, const at::Tensor& x, std::int64_t past) {
  return at::cat({held.narrow(2, 0, past).expand({x.size(0), -1, -1, -1}), x}, 2);
}

}  // namespace

TextRotary::TextRotary(Module* parent, std::string name, const TextConfig& config)
    : Module(parent, std::move(name), kinds::text_rotary),
      inverse_frequencies_(ops::inverse_frequencies(config.rope.theta, config.rotary_dim())),
      rope_(config.rope) {}

Flow<TextContext> TextRotary::operator()(Trace& trace, at::Tensor x, at::Tensor positions,
                                         TextContext context) const {
  co_await trace.at(input, x, positions);
  const auto mrope = rope_.mrope_interleaved ? ops::interleaved_mrope : ops::sectioned_mrope;
  std::tie(context.cos, context.sin) =
      mrope(positions, on_device(inverse_frequencies_, positions.device()), rope_.mrope_section,
            x.scalar_type());
  co_await trace.at(output, context.cos, context.sin);
  co_return context;
}

TextAttention::TextAttention(Module* parent, std::string name, const TextConfig& config, bool eager,
                             Form form)
    : Module(parent, std::move(name), form.kind),
      q_proj(this, "q_proj", config.hidden_size,
             config.num_attention_heads * config.head_dim * form.rows_per_query, form.qkv_bias),
      k_proj(this, "k_proj", config.hidden_size, config.num_key_value_heads * config.head_dim,
             form.qkv_bias),
      v_proj(this, "v_proj", config.hidden_size, config.num_key_value_heads * config.head_dim,
             form.qkv_bias),
      o_proj(this, "o_proj", config.num_attention_heads * config.head_dim, config.hidden_size,
             form.out_bias),
      head_dim_(config.head_dim),
      scale_(std::pow(static_cast<double>(config.head_dim), -0.5)),
      eager_(eager) {}

Flow<at::Tensor> TextAttention::operator()(Trace& trace, at::Tensor x, TextContext context) const {
  at::Tensor pattern;
  co_await trace.at(input, x, context.mask, context.cos, context.sin);
  if (!trace.skip(*this, x)) {
    at::Tensor asking = context.going_on(x);
    const std::int64_t batch = asking.size(0), rows = asking.size(1);
    Attended attended;
    at::Tensor gate;
    {
      Heads heads = co_await project(trace, std::move(x), std::move(asking));
      gate = std::move(heads.gate);
      heads = co_await place(trace, std::move(heads), context);
      attended = co_await attend(trace, heads, context.going_on(context.mask, 2));
    }
    pattern = std::move(attended.pattern);
    at::Tensor joined = std::exchange(attended.heads, {}).reshape({batch, rows, -1});
    if (gate.defined()) joined = joined * std::exchange(gate, {}).sigmoid();
    x = co_await o_proj(trace, std::move(joined));
  }
  co_await trace.at(output, x, pattern);
  co_return x;
}

at::Tensor TextAttention::per_head(const at::Tensor& x) const {
  return x.view({x.size(0), x.size(1), -1, head_dim_});
}

/// Rotates the heads, joins them to those of the positions before, and offers them.
Flow<TextAttention::Heads> TextAttention::place(Trace& trace, Heads heads,
                                                const TextContext& context) const {
  const at::Tensor cos = context.cos.unsqueeze(1), sin = context.sin.unsqueeze(1);
  heads.q =
      ops::rotate(heads.q.transpose(1, 2), context.going_on(cos, 2), context.going_on(sin, 2));
  heads.k = ops::rotate(heads.k.transpose(1, 2), cos, sin);
  heads.v = heads.v.transpose(1, 2);
  if (context.before) {
    heads.k = behind(context.before->keys(), heads.k, context.past);
    heads.v = behind(context.before->values(), heads.v, context.past);
  } else if (context.past > 0) {
    join_past(heads, context, trace.wants(queries));
  }
  at::Tensor mask = context.mask;
  const bool edited = co_await trace.at(queries, heads.q, heads.k, heads.v, mask);
  if (context.cache && (context.past == 0 || edited)) context.cache->replace(heads.k, heads.v);
  co_return heads;
}

// What is served must be a tensor of its own: the cache goes on being written to.
void TextAttention::join_past(Heads& heads, const TextContext& context, bool to_be_served) const {
  BlockCache& cache = *context.cache;
  check_follows(site_path(), "keys of", cache.length(), context.past);
  cache.append(heads.k, heads.v);
  heads.k = to_be_served ? cache.keys().clone() : cache.keys();
  heads.v = to_be_served ? cache.values().clone() : cache.values();
}

at::Tensor TextAttention::score_rows(Trace& trace, Site site, const ops::RowChoice& rows) const {
  const auto offered = [&](int slot) {
    site.slot = slot;
    return trace.peek(site);
  };
  const at::Tensor q = offered(0), k = offered(1), mask = offered(3);
  return ops::score_rows(q, k, mask, scale_, rows);
}

// Under sdpa the pattern is computed only for a reader who waits for it, and only one that the
// reader has changed (or put in a graph) is used.
Flow<TextAttention::Attended> TextAttention::attend(Trace& trace, const Heads& heads,
                                                    at::Tensor mask) const {
  const at::Tensor &q = heads.q, &k = heads.k, &v = heads.v;
  Attended result;
  bool by_pattern = eager_;
  if (eager_ || trace.wants(scores) || trace.wants(probabilities)) {
    at::Tensor pattern = ops::attention_scores(q, k, mask, scale_);
    by_pattern |= co_await trace.at(scores, pattern);
    if (by_pattern || trace.wants(probabilities)) {
      pattern = ops::attention_probabilities(pattern);
      if (trace.wants(probabilities)) pattern = ops::apart_from_graph(pattern);
      by_pattern |= co_await trace.at(probabilities, pattern);
    }
    if (by_pattern) result.heads = ops::attend(pattern, v);
    if (eager_) result.pattern = std::move(pattern);
  }
  if (!by_pattern) {
    result.heads = ops::fused_attention(q, k, v, mask, /*causal=*/true, scale_);
  }
  co_await trace.at(head_outputs, result.heads);
  co_return result;
}

NormedAttention::NormedAttention(Module* parent, std::string name, const TextConfig& config,
                                 bool eager)
    : TextAttention(parent, std::move(name), config, eager,
                    {config.attention_bias, config.attention_bias}),
      q_norm(this, "q_norm", config.head_dim, config.rms_norm_eps),
      k_norm(this, "k_norm", config.head_dim, config.rms_norm_eps) {}

Flow<TextAttention::Heads> NormedAttention::project(Trace& trace, at::Tensor x,
                                                    at::Tensor asking) const {
  Heads heads;
  heads.q = co_await q_proj(trace, std::move(asking));
  heads.q = co_await q_norm(trace, per_head(heads.q));
  heads.k = co_await k_proj(trace, x);
  heads.k = co_await k_norm(trace, per_head(heads.k));
  heads.v = co_await v_proj(trace, std::move(x));
  heads.v = per_head(heads.v);
  co_return heads;
}

GatedMlp::GatedMlp(Module* parent, std::string name, const Kind& kind, Widths widths,
                   bool with_bias)
    : Module(parent, std::move(name), kind),
      gate_proj(this, "gate_proj", widths.hidden, widths.intermediate, with_bias),
      up_proj(this, "up_proj", widths.hidden, widths.intermediate, with_bias),
      down_proj(this, "down_proj", widths.intermediate, widths.hidden, with_bias),
      act_fn(this, "act_fn", "silu") {}

Flow<at::Tensor> GatedMlp::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) {
    // A gate that nobody has seen may be activated and multiplied where it is, or by one kernel.
    const bool unseen = trace.passes(act_fn) && trace.passes(gate_proj);
    at::Tensor gate = co_await gate_proj(trace, x);
    if (!unseen) gate = co_await act_fn(trace, std::move(gate));
    x = co_await up_proj(trace, std::move(x));
    x = unseen ? ops::swiglu_over(gate, x) : gate * x;
    gate = at::Tensor();
    x = co_await down_proj(trace, std::move(x));
  }
  co_await trace.at(output, x);
  co_return x;
}

}  // namespace vlscope
