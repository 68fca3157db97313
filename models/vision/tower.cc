#include "models/vision/tower.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/linear.h>

#include <cmath>
#include <utility>

#include "core/device.h"
#include "core/ops/attention.h"
#include "core/ops/rotary.h"
#include "core/ops/torch_ops.h"

namespace vlscope {
namespace {

/// Rotates in float32 and returns the dtype of `x`. `x` is `[patches, heads, head_dim]`.
at::Tensor rotate_precisely(const at::Tensor& x, const VisionContext& context) {
  const at::Tensor cos = context.cos.unsqueeze(-2), sin = context.sin.unsqueeze(-2);
  if (x.is_cuda()) return ops::fused_rotate(x, cos, sin);
  return ops::rotate(x.to(ops::precise(x.scalar_type())), cos, sin).to(x.scalar_type());
}

/// `[patches, heads, head_dim]` -> `[1, heads, patches, head_dim]`.
at::Tensor heads_first(const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); }

std::vector<at::Tensor*> pointers(std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor*> addresses;
  for (at::Tensor& tensor : tensors) addresses.push_back(&tensor);
  return addresses;
}

}  // namespace

PatchProjection::PatchProjection(Module* parent, std::string name, const VisionConfig& config,
                                 bool with_bias)
    : Leaf(parent, std::move(name), kinds::conv3d), how_(config.patch_embedding) {
  declare("weight",
          {config.hidden_size, config.in_channels, config.temporal_patch_size, config.patch_size,
           config.patch_size},
          weight_);
  if (with_bias) declare("bias", {config.hidden_size}, bias_);
}

at::Tensor PatchProjection::apply(const at::Tensor& x) const {
  if (how_ == PatchEmbedding::kConvolution && x.is_cpu() && x.scalar_type() == at::kFloat) {
    return at::conv3d(x, weight_, bias_, /*stride=*/weight_.sizes().slice(2));
  }
  const at::Tensor rows = at::linear(x.flatten(1), weight_.flatten(1), bias_);
  return rows.view({x.size(0), weight_.size(0), 1, 1, 1});
}

at::Tensor PatchProjection::output_like(const at::Tensor& x) const {
  return shaped_like(weight_, {x.size(0), weight_.size(0), 1, 1, 1});
}

PatchEmbed::PatchEmbed(Module* parent, std::string name, const VisionConfig& config, bool with_bias)
    : Module(parent, std::move(name), kinds::patch_embed),
      proj(this, "proj", config, with_bias),
      patch_shape_{-1, config.in_channels, config.temporal_patch_size, config.patch_size,
                   config.patch_size} {}

Flow<at::Tensor> PatchEmbed::operator()(Trace& trace, at::Tensor pixels) const {
  co_await trace.at(input, pixels);
  if (!trace.skip(*this, pixels)) {
    at::Tensor patches = pixels.view(patch_shape_).to(proj.dtype());
    pixels = co_await proj(trace, std::move(patches));
    pixels = pixels.flatten(1);
  }
  co_await trace.at(output, pixels);
  co_return pixels;
}

at::Tensor PatchEmbed::output_like(const at::Tensor& pixels) const {
  return shaped_like(proj.weight(), {pixels.size(0), proj.weight().size(0)});
}

VisionRotary::VisionRotary(Module* parent, std::string name, const VisionConfig& config)
    : Module(parent, std::move(name), kinds::vision_rotary),
      inverse_frequencies_(ops::inverse_frequencies(config.rope_theta, config.head_dim() / 2)) {}

Flow<VisionContext> VisionRotary::operator()(Trace& trace, at::Tensor x, at::Tensor coordinates,
                                             VisionContext context) const {
  co_await trace.at(input, x, coordinates);
  std::tie(context.cos, context.sin) =
      ops::axial_rope(coordinates, on_device(inverse_frequencies_, coordinates.device()));
  co_await trace.at(output, context.cos, context.sin);
  co_return context;
}

VisionAttention::VisionAttention(Module* parent, std::string name, const VisionConfig& config,
                                 bool eager)
    : Module(parent, std::move(name), kinds::vision_attention),
      qkv(this, "qkv", config.hidden_size, 3 * config.hidden_size, true),
      proj(this, "proj", config.hidden_size, config.hidden_size, true),
      heads_(config.num_heads),
      scale_(std::pow(static_cast<double>(config.head_dim()), -0.5)),
      eager_(eager) {}

Flow<at::Tensor> VisionAttention::operator()(Trace& trace, at::Tensor x,
                                             VisionContext context) const {
  co_await trace.at(input, x, context.cu_seqlens, context.max_seqlen, context.cos, context.sin);
  if (!trace.skip(*this, x)) {
    const std::int64_t patches = x.size(0);
    x = co_await qkv(trace, std::move(x));
    const at::Tensor parts = x.reshape({patches, 3, heads_, -1});
    at::Tensor q = heads_first(rotate_precisely(parts.select(1, 0), context));
    at::Tensor k = heads_first(rotate_precisely(parts.select(1, 1), context));
    at::Tensor v = heads_first(parts.select(1, 2));
    co_await trace.at(queries, q, k, v);
    // Not made in the call: g++ 12 destroys an aggregate that is a coroutine's argument twice.
    Segment whole{std::move(q), std::move(k), std::move(v)};
    x = co_await attend(trace, std::move(whole), context);
    co_await trace.at(head_outputs, x);
    x = x.reshape({patches, -1});
    x = co_await proj(trace, std::move(x));
  }
  co_await trace.at(output, x);
  co_return x;
}

/// All segments by one kernel. `[1, patches, heads, head_dim]`.
at::Tensor VisionAttention::heads_at_once(const Segment& whole,
                                          const VisionContext& context) const {
  const auto rows = [](const at::Tensor& x) { return x.squeeze(0).transpose(0, 1); };
  return ops::segmented_attention(rows(whole.q), rows(whole.k), rows(whole.v), context.cu_seqlens,
                                  scale_)
      .unsqueeze(0);
}

std::vector<VisionAttention::Segment> VisionAttention::segments_of(const Segment& whole,
                                                                   const VisionContext& context) {
  std::vector<Segment> segments;
  std::int64_t start = 0;
  for (const std::int64_t length : *context.segments) {
    const auto part = [&](const at::Tensor& x) { return x.narrow(2, start, length); };
    segments.push_back({part(whole.q), part(whole.k), part(whole.v)});
    start += length;
  }
  return segments;
}

// The patterns of all segments are held only for a reader who waits for them, and only those that
// the reader has changed (or put in a graph) are used under sdpa.
Flow<at::Tensor> VisionAttention::attend(Trace& trace, Segment whole,
                                         const VisionContext& context) const {
  const std::vector<Segment> segments = segments_of(whole, context);
  std::vector<at::Tensor> patterns(segments.size());
  if (trace.wants(image_scores) || trace.wants(image_probabilities)) {
    for (std::size_t i = 0; i < segments.size(); ++i) {
      patterns[i] = ops::full_scores(segments[i].q, segments[i].k, scale_).squeeze(0);
    }
    bool by_pattern = eager_;
    by_pattern |= co_await trace.at_all(image_scores, pointers(patterns));
    const bool asked = trace.wants(image_probabilities);
    if (by_pattern || asked) {
      for (at::Tensor& pattern : patterns) {
        pattern = ops::attention_probabilities(pattern);
        // Softmax keeps its result for the backward pass; an edit must not reach that.
        if (asked && pattern.requires_grad()) pattern = pattern.clone();
      }
      by_pattern |= co_await trace.at_all(image_probabilities, pointers(patterns));
    }
    if (!by_pattern) patterns.assign(segments.size(), {});
  }
  const bool at_once = !whole.q.is_cpu() && !eager_ && !patterns.front().defined();
  if (at_once) co_return heads_at_once(whole, context);
  std::vector<at::Tensor> heads;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    heads.push_back(heads_of(segments[i], std::exchange(patterns[i], {})));
  }
  co_return heads.size() == 1 ? heads.front() : at::cat(heads, 1);
}

/// @param pattern `[heads, patches, patches]`, or undefined to take the implementation's own way
at::Tensor VisionAttention::heads_of(const Segment& segment, const at::Tensor& pattern) const {
  const auto& [q, k, v] = segment;
  if (pattern.defined()) return ops::attend(pattern.unsqueeze(0), v);
  if (!eager_) return ops::fused_attention(q, k, v, {}, /*causal=*/false, scale_);
  return ops::attend(ops::attention_probabilities(ops::full_scores(q, k, scale_)), v);
}

TwoLayerMlp::TwoLayerMlp(Module* parent, std::string name, const VisionConfig& config,
                         const Names& names)
    : Module(parent, std::move(name), kinds::vision_mlp),
      up_(this, names.up, config.hidden_size, config.intermediate_size, true),
      act_fn_(this, names.act_fn, config.hidden_act),
      down_(this, names.down, config.intermediate_size, config.hidden_size, true) {}

Flow<at::Tensor> TwoLayerMlp::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) {
    x = co_await up_(trace, std::move(x));
    x = co_await act_fn_(trace, std::move(x));
    x = co_await down_(trace, std::move(x));
  }
  co_await trace.at(output, x);
  co_return x;
}

Merger::Merger(Module* parent, std::string name, const Kind& kind, const VisionConfig& config,
               Norm norm)
    : Module(parent, std::move(name), kind),
      norm(this, "norm",
           norm == Norm::kBlock ? config.hidden_size * block_area(config) : config.hidden_size,
           kVisionNormEps),
      linear_fc1(this, "linear_fc1", config.hidden_size * block_area(config),
                 config.hidden_size * block_area(config), true),
      act_fn(this, "act_fn", "gelu"),
      linear_fc2(this, "linear_fc2", config.hidden_size * block_area(config),
                 config.out_hidden_size, true),
      block_width_(config.hidden_size * block_area(config)),
      norm_(norm) {}

at::Tensor Merger::output_like(const at::Tensor& x) const {
  return linear_fc2.output_like(x.reshape({-1, block_width_}));
}

Flow<at::Tensor> Merger::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) {
    if (norm_ == Norm::kBlock) x = x.view({-1, block_width_});
    x = co_await norm(trace, std::move(x));
    if (norm_ == Norm::kPatch) x = x.view({-1, block_width_});
    x = co_await linear_fc1(trace, std::move(x));
    x = co_await act_fn(trace, std::move(x));
    x = co_await linear_fc2(trace, std::move(x));
  }
  co_await trace.at(output, x);
  co_return x;
}

}  // namespace vlscope
