#include "models/text/model.h"

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/device.h"
#include "core/ops/attention.h"

namespace vlscope {
namespace {

/// `x` with `features` added at `rows`. A new tensor: `x` has been served and stays what it was.
at::Tensor add_at_rows(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& features) {
  const at::Tensor before = x.flatten(0, 1).index({rows});
  return put_rows(x, rows, before + features.to(x.scalar_type()));
}

void move(TextContext& context, at::Device device) {
  for (at::Tensor* tensor : {&context.mask, &context.padding, &context.cos, &context.sin}) {
    *tensor = moved(*tensor, device);
  }
}

}  // namespace

at::Tensor put_rows(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& features) {
  return x.flatten(0, 1).index_copy(0, rows, features.to(x.scalar_type())).view_as(x);
}

TextModel::TextModel(Module* parent, std::string name, const TextConfig& config,
                     const TextParts& parts, bool eager)
    : Module(parent, std::move(name), kinds::text_model),
      embed_tokens(this, "embed_tokens", config.vocab_size, config.hidden_size),
      norm(parts.norm(this, "norm", config)),
      rotary_emb(this, "rotary_emb", config),
      eager_(eager) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(config.num_hidden_layers); ++i) {
    layers.push_back(parts.block({this, fmt::format("layers.{}", i), i}, config, eager));
    layers.back()->set_unavailable("deepstack_output",
                                   "this family has no DeepStack: what the tower gives the text "
                                   "model is vision.image_features alone, before block 0");
  }
}

void TextModel::add_deepstack(std::size_t levels) {
  const std::size_t added = std::min(levels, layers.size());
  for (std::size_t k = 0; k < layers.size(); ++k) {
    std::string reason;
    if (k < added) {
      deepstack_outputs.push_back(std::make_unique<Location>(layers[k].get(), "deepstack_output"));
    } else {
      reason = fmt::format(
          "the model has {} DeepStack levels, added after blocks 0 to {}; block {} has none", added,
          static_cast<int>(added) - 1, k);
    }
    layers[k]->set_unavailable("deepstack_output", std::move(reason));
  }
}

at::Tensor TextModel::mask(const Input& in) const {
  const std::int64_t queries = in.inputs_embeds.size(1), keys = in.attention_mask.size(1);
  // Without padding the fused kernels know the causal mask by themselves.
  const bool plain = queries == keys || queries == 1;
  if (!eager_ && plain && in.attention_mask.all().item<bool>()) return {};
  const at::Tensor allowed = ops::causal_mask(in.attention_mask, queries);
  return eager_ ? ops::additive_mask(allowed, in.inputs_embeds.scalar_type()) : allowed;
}

at::Tensor TextModel::padding(const Input& in) const {
  const std::int64_t seq = in.inputs_embeds.size(1), positions = in.attention_mask.size(1);
  // What follows a prompt is never padding.
  if (seq == 1 || in.attention_mask.all().item<bool>()) return {};
  return on_device(in.attention_mask.narrow(1, positions - seq, seq), in.inputs_embeds.device());
}

Flow<at::Tensor> TextModel::operator()(Trace& trace, Input in) const {
  std::vector<at::Tensor*> arguments{&in.inputs_embeds, &in.attention_mask, &in.position_ids,
                                     &in.visual_pos_masks};
  for (at::Tensor& level : in.deepstack) arguments.push_back(&level);
  co_await trace.at_all(input, std::move(arguments));

  TextContext context;
  context.mask = mask(in);
  context.padding = padding(in);
  context.past = in.attention_mask.size(1) - in.inputs_embeds.size(1);
  at::Tensor x = std::exchange(in.inputs_embeds, {});
  if (context.mask.defined()) context.mask = on_device(context.mask, x.device());
  context = co_await rotary_emb(trace, x, in.position_ids, context);

  const Recording* recorded = in.replay.from.get();
  if (in.cache && recorded && !recorded->keys) recorded = nullptr;
  bool replayed = false;  // `x` is the recording's own tensor
  for (std::size_t k = 0; k < layers.size(); ++k) {
    if (in.replay.into) in.replay.into->streams.push_back(x);
    if (in.cache) context.cache = &in.cache->block(k);
    if (in.before) context.before = &in.before->block(k);
    if (recorded && trace.passes_unchanged(end_of(k, in))) {
      x = recorded->streams[k + 1];
      replayed = true;
      if (in.cache) context.cache->replace(recorded->keys->block(k));
      continue;
    }
    // The blocks may live on several devices: the stream follows them.
    x = moved(x, layers[k]->device());
    move(context, x.device());
    // A block reads the stream in more than one place: an edit must be seen in all of them.
    if (std::exchange(replayed, false)) x = x.clone();
    if (nobody_sees_the_rest(trace, k, in)) context.kept = 1;
    x = co_await (*layers[k])(trace, std::move(x), context);
    if (k < deepstack_outputs.size() && k < in.deepstack.size()) {
      at::Tensor level = moved(std::exchange(in.deepstack[k], {}), x.device());
      co_await trace.at(*deepstack_outputs[k], level);
      x = add_at_rows(x, moved(in.visual_rows, x.device()), level);
    }
  }
  if (in.replay.into) in.replay.into->streams.push_back(x);
  if (replayed) x = x.clone();
  x = moved(x, norm->device());
  x = co_await (*norm)(trace, std::move(x));
  co_await trace.at(output, x);
  co_return x;
}

/// The last location before the next block.
const Location& TextModel::end_of(std::size_t block, const Input& in) const {
  const bool adds = block < deepstack_outputs.size() && block < in.deepstack.size();
  return adds ? *deepstack_outputs[block] : layers[block]->output;
}

/// True in a last block behind which only the last position goes on, unless a reader stops before
/// the model's end.
bool TextModel::nobody_sees_the_rest(const Trace& trace, std::size_t block, const Input& in) const {
  const bool adds = &end_of(block, in) != &layers[block]->output;
  return in.last_alone && block + 1 == layers.size() && !adds && trace.passes(*parent());
}

}  // namespace vlscope
