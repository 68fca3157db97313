#include "models/qwen3_vl.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/ops/attention.h"

namespace vlscope {
namespace {

constexpr std::int64_t kNoToken = -1;

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

/// One tensor of those of the images and those of the videos, of which one may be undefined.
at::Tensor joined(const at::Tensor& images, const at::Tensor& videos) {
  if (!images.defined()) return videos;
  return videos.defined() ? at::cat({images, videos}) : images;
}

/// A stream that has been read and will be offered again. A graph keeps what its operations have
/// read, so an edit from here on goes to a tensor of its own.
at::Tensor beyond_its_reader(const at::Tensor& x) { return x.requires_grad() ? x.clone() : x; }

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
      x = beyond_its_reader(x);
    }
  }
  features.merged = co_await merger(trace, x);
  x = beyond_its_reader(x);

  std::vector<at::Tensor*> result{&x, &features.merged};
  for (at::Tensor& level : features.deepstack) result.push_back(&level);
  co_await trace.at_all(output, std::move(result));
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

  const Recording* recorded = in.replay.from.get();
  if (in.cache && recorded && !recorded->keys) recorded = nullptr;
  for (std::size_t k = 0; k < layers.size(); ++k) {
    if (in.replay.into) in.replay.into->streams.push_back(x);
    if (in.cache) context.cache = &in.cache->block(k);
    if (recorded && trace.passes_unchanged(end_of(k, in))) {
      x = recorded->streams[k + 1];
      if (in.cache) context.cache->replace(recorded->keys->block(k));
      continue;
    }
    x = co_await (*layers[k])(trace, std::move(x), context);
    if (k < deepstack_outputs.size() && k < in.deepstack.size()) {
      at::Tensor level = std::exchange(in.deepstack[k], {});
      co_await trace.at(*deepstack_outputs[k], level);
      x = add_at_rows(x, in.visual_rows, level);
    }
  }
  if (in.replay.into) in.replay.into->streams.push_back(x);
  x = co_await norm(trace, std::move(x));
  co_await trace.at(output, x);
  co_return x;
}

/// The last location before the next block.
const Location& Qwen3VLText::end_of(std::size_t block, const Input& in) const {
  const bool adds = block < deepstack_outputs.size() && block < in.deepstack.size();
  return adds ? *deepstack_outputs[block] : layers[block]->output;
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
  const Qwen3VLText& text = model.language_model;
  const bool edited =
      co_await trace.at(model.input, inputs.input_ids, inputs.attention_mask, inputs.pixel_values,
                        inputs.pixel_values_videos, inputs.image_grid_thw, inputs.video_grid_thw);
  if (edited) inputs = checked(inputs, config());
  const at::Device device = text.embed_tokens.weight().device();
  const bool prompt = inputs.past() == 0;  // What a later step reads is text, whatever its id.
  at::Tensor image_mask = inputs.input_ids == (prompt ? config().image_token_id : kNoToken);
  at::Tensor video_mask = inputs.input_ids == (prompt ? config().video_token_id : kNoToken);
  at::Tensor visual_mask = image_mask.logical_or(video_mask);
  co_await trace.at(model.visual.image_token_mask, image_mask, video_mask, visual_mask);

  at::Tensor ids = inputs.input_ids.to(device);
  Qwen3VLText::Input in;
  in.inputs_embeds = co_await text.embed_tokens(trace, std::move(ids));
  if (inputs.pixel_values.defined() || inputs.pixel_values_videos.defined()) {
    in.visual_pos_masks = std::move(visual_mask);
    in = co_await see(trace, inputs, std::move(in));
  }
  in.attention_mask = inputs.attention_mask;
  in.position_ids = inputs.position_ids.to(device);
  in.replay = inputs.replay;
  in.cache = inputs.cache.get();

  at::Tensor hidden = co_await text(trace, std::move(in));
  co_await trace.at(model.output, hidden);
  co_return hidden;
}

Flow<Qwen3VLText::Input> Qwen3VL::see(Trace& trace, const Inputs& inputs,
                                      Qwen3VLText::Input in) const {
  const at::Device device = in.inputs_embeds.device();
  VisionFeatures features;
  if (inputs.replay.from && trace.passes_unchanged(model.visual.output)) {
    features = inputs.replay.from->vision;
  } else {
    at::Tensor pixels = joined(inputs.pixel_values, inputs.pixel_values_videos);
    pixels = pixels.to(device, in.inputs_embeds.scalar_type());
    at::Tensor grids = joined(inputs.image_grid_thw, inputs.video_grid_thw);
    features = co_await model.visual(trace, std::move(pixels), std::move(grids));
  }
  if (inputs.replay.into) inputs.replay.into->vision = features;
  const at::Tensor image_rows = rows_of(inputs.input_ids == config().image_token_id);
  const at::Tensor video_rows = rows_of(inputs.input_ids == config().video_token_id);
  const bool both = inputs.pixel_values.defined() && inputs.pixel_values_videos.defined();
  at::Tensor images = std::exchange(features.merged, {}), videos;
  if (!inputs.pixel_values.defined()) {
    std::swap(images, videos);
  } else if (both) {
    videos = images.narrow(0, image_rows.size(0), video_rows.size(0));
    images = images.narrow(0, 0, image_rows.size(0));
  }
  co_await trace.at(model.visual.image_features, images, videos);
  for (const auto& [rows, part] : {std::pair(image_rows, images), std::pair(video_rows, videos)}) {
    if (part.defined()) in.inputs_embeds = put_rows(in.inputs_embeds, rows.to(device), part);
  }
  in.visual_rows = rows_of(in.visual_pos_masks).to(device);
  if (both) {
    // The tower has the images first; the text model takes the rows as the prompt has them.
    const at::Tensor order = at::argsort(at::cat({image_rows, video_rows})).to(device);
    for (at::Tensor& level : features.deepstack) level = level.index_select(0, order);
  }
  in.deepstack = std::move(features.deepstack);
  co_return in;
}

}  // namespace vlscope
