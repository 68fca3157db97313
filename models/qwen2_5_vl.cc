#include "models/qwen2_5_vl.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/device.h"

namespace vlscope {

Qwen25VLVision::Qwen25VLVision(Module* parent, std::string name, const VisionConfig& config,
                               bool eager)
    : VisionTower(parent, std::move(name)),
      patch_embed(this, "patch_embed", config, /*with_bias=*/false),
      rotary_pos_emb(this, "rotary_pos_emb", config),
      merger(this, "merger", config),
      full_attention_(config.fullatt_block_indexes),
      merge_(config.spatial_merge_size),
      window_side_(config.window_tokens()) {
  for (std::int64_t i = 0; i < config.depth; ++i) {
    blocks.push_back(std::make_unique<VisionLayer<RmsNorm, GatedVisionMlp>>(
        this, fmt::format("blocks.{}", i), config, eager));
  }
}

bool Qwen25VLVision::sees_whole_frame(std::size_t block) const {
  return std::find(full_attention_.begin(), full_attention_.end(),
                   static_cast<std::int64_t>(block)) != full_attention_.end();
}

/// `[patches, width]`; the patches of a token stay together.
at::Tensor Qwen25VLVision::in_window_order(const at::Tensor& rows,
                                           const WindowLayout& windows) const {
  const at::Tensor tokens = rows.reshape({rows.size(0) / (merge_ * merge_), merge_ * merge_, -1});
  return tokens.index({on_device(windows.order, rows.device())}).reshape({rows.size(0), -1});
}

Flow<VisionFeatures> Qwen25VLVision::operator()(Trace& trace, at::Tensor pixels,
                                                at::Tensor grid_thw) const {
  VisionFeatures features;
  co_await trace.at(input, pixels, grid_thw);
  const at::Device device = pixels.device();
  const std::vector<Grid> grids = grids_of(grid_thw);
  const VisionLayout layout = vision_layout(grids, merge_);
  const WindowLayout windows = window_layout(grids, merge_, window_side_);

  at::Tensor x = co_await patch_embed(trace, std::move(pixels));
  x = in_window_order(x, windows);
  VisionContext frames{layout.cu_seqlens, {}, {}, {}, &layout.segments};
  at::Tensor coordinates = on_device(layout.coordinates, device);
  frames = co_await rotary_pos_emb(trace, x, std::move(coordinates), frames);
  frames.cos = in_window_order(frames.cos, windows);
  frames.sin = in_window_order(frames.sin, windows);
  VisionContext within_windows = frames;
  within_windows.cu_seqlens = windows.cu_seqlens;
  within_windows.segments = &windows.segments;

  for (std::size_t i = 0; i < blocks.size(); ++i) {
    x = co_await (*blocks[i])(trace, std::move(x), sees_whole_frame(i) ? frames : within_windows);
  }
  features.merged = co_await merger(trace, x);
  features.merged = features.merged.index({on_device(windows.places, device)});
  x = beyond_its_reader(x);
  co_await trace.at(output, x, features.merged);
  co_return features;
}

Qwen25VL::Qwen25VL(const Config& config, Attention attention)
    : VisionLanguageModel(config, attention, {build_tower<Qwen25VLVision>, kQwen2Text}) {}

}  // namespace vlscope
