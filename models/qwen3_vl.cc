#include "models/qwen3_vl.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/ops/attention.h"

namespace vlscope {
namespace {

std::string indexed(const char* list, std::size_t i) { return fmt::format("{}.{}", list, i); }

/// `x` with `features` in place of the rows `rows` of its flattened `[batch * seq, hidden]`.
at::Tensor put_rows(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& features) {
  return x.flatten(0, 1).index_copy(0, rows, features.to(x.scalar_type())).view_as(x);
}

/// The same with `features` added. A new tensor: `x` has been served and stays what it was.
at::Tensor add_at_rows(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& features) {
  const at::Tensor before = x.flatten(0, 1).index({rows});
  return put_rows(x, rows, before + features.to(x.scalar_type()));
}

}  // namespace

// --- Vision -------------------------------------------------------------------------------------

Qwen3VLVision::Qwen3VLVision(Module* parent, std::string name, const VisionConfig& config,
                             bool eager)
    : Module(parent, std::move(name), kinds::vision),
      patch_embed(this, "patch_embed", config),
      pos_embed(this, "pos_embed", config.num_position_embeddings, config.hidden_size),
      rotary_pos_emb(this, "rotary_pos_emb", config),
      merger(this, "merger", kinds::projector, config, Merger::Norm::kPatch),
      taps_(config.deepstack_visual_indexes),
      merge_(config.spatial_merge_size),
      table_side_(std::lround(std::sqrt(static_cast<double>(config.num_position_embeddings)))) {
  for (std::int64_t i = 0; i < config.depth; ++i) {
    blocks.push_back(std::make_unique<VisionLayer>(this, indexed("blocks", i), config, eager));
  }
  for (std::size_t k = 0; k < taps_.size(); ++k) {
    deepstack_merger_list.push_back(std::make_unique<Merger>(
        this, indexed("deepstack_merger_list", k), kinds::merger, config, Merger::Norm::kBlock));
  }
}

const Merger* Qwen3VLVision::tap_after(std::size_t block) const {
  const auto tap = std::find(taps_.begin(), taps_.end(), static_cast<std::int64_t>(block));
  return tap == taps_.end() ? nullptr : deepstack_merger_list[tap - taps_.begin()].get();
}

Flow<at::Tensor> Qwen3VLVision::embed(Trace& trace, at::Tensor pixels,
                                      const VisionLayout& layout) const {
  const at::Device device = pixels.device();
  at::Tensor x = co_await patch_embed(trace, std::move(pixels));
  at::Tensor positions = layout.position_taps.to(device);
  positions = co_await pos_embed(trace, std::move(positions));
  positions = (positions * layout.position_weights.to(device).unsqueeze(-1)).sum(1);
  co_return x + positions.to(x.scalar_type());
}

Flow<VisionFeatures> Qwen3VLVision::operator()(Trace& trace, at::Tensor pixels,
                                               at::Tensor grid_thw) const {
  VisionFeatures features;
  co_await trace.at(input, pixels, grid_thw);
  const at::Device device = pixels.device();
  const VisionLayout layout = vision_layout(grids_of(grid_thw), merge_, table_side_);

  at::Tensor x = co_await embed(trace, std::move(pixels), layout);
  VisionContext context{layout.cu_seqlens, {}, {}, {}, &layout.segments};
  at::Tensor coordinates = layout.coordinates.to(device);
  context = co_await rotary_pos_emb(trace, x, std::move(coordinates), context);

  for (std::size_t i = 0; i < blocks.size(); ++i) {
    x = co_await (*blocks[i])(trace, std::move(x), context);
    if (const Merger* tap = tap_after(i)) {
      features.deepstack.push_back(co_await (*tap)(trace, x));
    }
  }
  features.image_features = co_await merger(trace, x);

  std::vector<at::Tensor*> result{&x, &features.image_features};
  for (at::Tensor& level : features.deepstack) result.push_back(&level);
  co_await trace.at_all(output, std::move(result));
  co_await trace.at(image_features, features.image_features);
  co_return features;
}

// --- Text ---------------------------------------------------------------------------------------

Qwen3VLText::Qwen3VLText(Module* parent, std::string name, const TextConfig& config,
                         std::size_t levels, Attention attention)
    : Module(parent, std::move(name), kinds::text_model),
      embed_tokens(this, "embed_tokens", config.vocab_size, config.hidden_size),
      norm(this, "norm", config.hidden_size, config.rms_norm_eps),
      rotary_emb(this, "rotary_emb", config),
      eager_(attention == Attention::kEager) {
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers.push_back(std::make_unique<TextLayer>(this, indexed("layers", i), config, eager_));
  }
  const std::size_t added = std::min(levels, layers.size());
  for (std::size_t k = 0; k < layers.size(); ++k) {
    if (k < added) {
      deepstack_outputs.push_back(std::make_unique<Location>(layers[k].get(), "deepstack_output"));
    } else {
      layers[k]->set_unavailable(
          "deepstack_output",
          fmt::format("the model has {} DeepStack levels, added after blocks 0 to {}; block {} has "
                      "none",
                      added, static_cast<int>(added) - 1, k));
    }
  }
}

at::Tensor Qwen3VLText::mask(const Input& in) const {
  const std::int64_t queries = in.inputs_embeds.size(1), keys = in.attention_mask.size(1);
  // Without padding the fused kernels know the causal mask by themselves.
  const bool plain = queries == keys || queries == 1;
  if (!eager_ && plain && in.attention_mask.all().item<bool>()) return {};
  const at::Tensor allowed = ops::causal_mask(in.attention_mask, queries);
  return eager_ ? ops::additive_mask(allowed, in.inputs_embeds.scalar_type()) : allowed;
}

Flow<at::Tensor> Qwen3VLText::operator()(Trace& trace, Input in) const {
  std::vector<at::Tensor*> arguments{&in.inputs_embeds, &in.attention_mask, &in.position_ids,
                                     &in.visual_pos_masks};
  for (at::Tensor& level : in.deepstack) arguments.push_back(&level);
  co_await trace.at_all(input, std::move(arguments));

  TextContext context;
  context.mask = mask(in);
  context.past = in.attention_mask.size(1) - in.inputs_embeds.size(1);
  at::Tensor x = std::exchange(in.inputs_embeds, {});
  if (context.mask.defined()) context.mask = context.mask.to(x.device());
  context = co_await rotary_emb(trace, x, in.position_ids, context);

  for (std::size_t k = 0; k < layers.size(); ++k) {
    if (in.cache) context.cache = &in.cache->block(k);
    x = co_await (*layers[k])(trace, std::move(x), context);
    if (k < deepstack_outputs.size() && k < in.deepstack.size()) {
      at::Tensor level = std::exchange(in.deepstack[k], {});
      co_await trace.at(*deepstack_outputs[k], level);
      x = add_at_rows(x, in.visual_rows, level);
    }
  }
  x = co_await norm(trace, std::move(x));
  co_await trace.at(output, x);
  co_return x;
}

// --- Both ---------------------------------------------------------------------------------------

Qwen3VLModel::Qwen3VLModel(Module* parent, std::string name, const Config& config,
                           Attention attention)
    : Module(parent, std::move(name), kinds::multimodal_model),
      visual(this, "visual", config.vision, attention == Attention::kEager),
      language_model(this, "language_model", config.text,
                     config.vision.deepstack_visual_indexes.size(), attention) {}

Qwen3VL::Qwen3VL(const Config& config, Attention attention)
    : CausalLM(config), model(this, "model", config, attention) {}

Flow<at::Tensor> Qwen3VL::hidden_states(Trace& trace, Inputs& inputs) const {
  const Qwen3VLVision& visual = model.visual;
  const Qwen3VLText& text = model.language_model;
  const bool edited = co_await trace.at(model.input, inputs.input_ids, inputs.attention_mask,
                                        inputs.pixel_values, inputs.image_grid_thw);
  if (edited) inputs = checked(inputs, config());
  const at::Device device = text.embed_tokens.weight().device();
  // What a step generates is text, whatever its id.
  at::Tensor image_mask = inputs.past() > 0 ? at::zeros_like(inputs.input_ids, at::kBool)
                                            : inputs.input_ids == config().image_token_id;
  co_await trace.at(visual.image_token_mask, image_mask);

  at::Tensor ids = inputs.input_ids.to(device);
  Qwen3VLText::Input in;
  in.inputs_embeds = co_await text.embed_tokens(trace, std::move(ids));
  if (inputs.pixel_values.defined()) {
    at::Tensor pixels = inputs.pixel_values.to(device, in.inputs_embeds.scalar_type());
    VisionFeatures features = co_await visual(trace, std::move(pixels), inputs.image_grid_thw);
    in.visual_pos_masks = image_mask;
    in.visual_rows = token_rows(inputs.input_ids, config().image_token_id).to(device);
    in.inputs_embeds = put_rows(in.inputs_embeds, in.visual_rows, features.image_features);
    in.deepstack = std::move(features.deepstack);
  }
  in.attention_mask = inputs.attention_mask;
  in.position_ids = inputs.position_ids.to(device);
  in.cache = inputs.cache.get();

  at::Tensor hidden = co_await text(trace, std::move(in));
  co_await trace.at(model.output, hidden);
  co_return hidden;
}

}  // namespace vlscope
