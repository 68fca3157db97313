#include "models/qwen2_vl.h"

#include <fmt/format.h>

#include <utility>

#include "core/device.h"

namespace vlscope {

Qwen2VLVision::Qwen2VLVision(Module* parent, std::string name, const VisionConfig& config,
                             bool eager)
    : VisionTower(parent, std::move(name)),
      patch_embed(this, "patch_embed", config, /*with_bias=*/false),
      rotary_pos_emb(this, "rotary_pos_emb", config),
      merger(this, "merger", config),
      merge_(config.spatial_merge_size) {
  for (std::int64_t i = 0; i < config.depth; ++i) {
    blocks.push_back(std::make_unique<VisionLayer<LayerNorm, Qwen2VLVisionMlp>>(
        this, fmt::format("blocks.{}", i), config, eager));
  }
}

Flow<VisionFeatures> Qwen2VLVision::operator()(Trace& trace, at::Tensor pixels,
                                               at::Tensor grid_thw) const {
  VisionFeatures features;
  co_await trace.at(input, pixels, grid_thw);
  const VisionLayout layout = vision_layout(grids_of(grid_thw), merge_);
  at::Tensor coordinates = on_device(layout.coordinates, pixels.device());

  at::Tensor x = co_await patch_embed(trace, std::move(pixels));
  VisionContext context{layout.cu_seqlens, {}, {}, {}, &layout.segments};
  context = co_await rotary_pos_emb(trace, x, std::move(coordinates), context);
  for (const auto& block : blocks) x = co_await (*block)(trace, std::move(x), context);
  features.merged = co_await merger(trace, x);
  x = beyond_its_reader(x);
  co_await trace.at(output, x, features.merged);
  co_return features;
}

Qwen2VL::Qwen2VL(const Config& config, Attention attention)
    : VisionLanguageModel(config, attention, {build_tower<Qwen2VLVision>, kQwen2Text}) {}

}  // namespace vlscope
