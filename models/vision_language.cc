#include "models/vision_language.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <utility>

#include "core/device.h"
#include "models/tail.h"

namespace vlscope {
namespace {

/// One tensor of those of the images and those of the videos, of which one may be undefined.
at::Tensor joined(const at::Tensor& images, const at::Tensor& videos) {
  if (!images.defined()) return videos;
  return videos.defined() ? at::cat({images, videos}) : images;
}

}  // namespace

MultimodalModel::MultimodalModel(Module* parent, std::string name, const Config& config,
                                 const FamilyParts& parts, bool eager)
    : Module(parent, std::move(name), kinds::multimodal_model),
      visual(parts.tower(this, "visual", config.vision, eager)),
      language_model(this, "language_model", config.text, parts.text, eager) {
  if (const auto levels = visual->deepstack_levels()) language_model.add_deepstack(*levels);
}

VisionLanguageModel::VisionLanguageModel(const Config& config, Attention attention,
                                         const FamilyParts& parts)
    : CausalLM(config), model(this, "model", config, parts, attention == Attention::kEager) {}

Flow<at::Tensor> VisionLanguageModel::hidden_states(Trace& trace, Inputs& inputs) const {
  TextModel::Input in;
  if (inputs.replay.tail) {
    in = tail_of(inputs, config(), model.visual->deepstack_levels().has_value());
    inputs.attention_mask = in.attention_mask;
  } else {
    in = co_await embed(trace, inputs);
  }
  at::Tensor hidden = co_await model.language_model(trace, std::move(in));
  co_await trace.at(model.output, hidden);
  co_return hidden;
}

Flow<TextModel::Input> VisionLanguageModel::embed(Trace& trace, Inputs& inputs) const {
  const TextModel& text = model.language_model;
  const bool edited =
      co_await trace.at(model.input, inputs.input_ids, inputs.attention_mask, inputs.pixel_values,
                        inputs.pixel_values_videos, inputs.image_grid_thw, inputs.video_grid_thw,
                        inputs.second_per_grid_ts);
  if (edited) inputs = checked(inputs, config());
  const at::Device device = text.embed_tokens.device();
  VisualTokens visual = visual_tokens(inputs, config());
  co_await trace.at(model.visual->image_token_mask, visual.images, visual.videos, visual.mask);

  at::Tensor ids = on_device(inputs.input_ids, device);
  TextModel::Input in;
  in.inputs_embeds = co_await text.embed_tokens(trace, std::move(ids));
  if (inputs.pixel_values.defined() || inputs.pixel_values_videos.defined()) {
    if (model.visual->deepstack_levels()) in.visual_pos_masks = visual.mask;
    in = co_await see(trace, inputs, visual, std::move(in));
  }
  in.attention_mask = inputs.attention_mask;
  in.position_ids = on_device(inputs.position_ids, device);
  in.replay = inputs.replay;
  in.cache = inputs.cache.get();
  co_return in;
}

Flow<TextModel::Input> VisionLanguageModel::see(Trace& trace, const Inputs& inputs,
                                                const VisualTokens& visual,
                                                TextModel::Input in) const {
  const at::Device device = in.inputs_embeds.device();
  VisionFeatures features;
  if (inputs.replay.from && trace.passes_unchanged(model.visual->output)) {
    features = inputs.replay.from->vision;
  } else {
    at::Tensor pixels = joined(inputs.pixel_values, inputs.pixel_values_videos);
    pixels = on_device(pixels, device).to(in.inputs_embeds.scalar_type());
    at::Tensor grids = joined(inputs.image_grid_thw, inputs.video_grid_thw);
    features = co_await (*model.visual)(trace, std::move(pixels), std::move(grids));
  }
  if (inputs.replay.into) inputs.replay.into->vision = features;
  const at::Tensor image_rows = rows_of(visual.images), video_rows = rows_of(visual.videos);
  at::Tensor images = std::exchange(features.merged, {}), videos;
  if (!inputs.pixel_values.defined()) {
    std::swap(images, videos);
  } else if (inputs.pixel_values_videos.defined()) {
    videos = images.narrow(0, image_rows.size(0), video_rows.size(0));
    images = images.narrow(0, 0, image_rows.size(0));
  }
  co_await trace.at(model.visual->image_features, images, videos);
  for (const auto& [rows, part] : {std::pair(image_rows, images), std::pair(video_rows, videos)}) {
    if (part.defined())
      in.inputs_embeds = put_rows(in.inputs_embeds, on_device(rows, device), part);
  }
  if (!in.visual_pos_masks.defined()) co_return in;
  in.visual_rows = on_device(rows_of(in.visual_pos_masks), device);
  // The text model takes the rows as the prompt has them.
  in.deepstack = in_prompt_order(std::move(features.deepstack), visual);
  if (!model.visual->deepstack_levels()) in.visual_pos_masks = at::Tensor();
  co_return in;
}

}  // namespace vlscope
