// Qwen2.5-VL: 3B to 72B. arXiv:2502.13923.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/text/qwen2.h"
#include "models/vision/patch_merger.h"
#include "models/vision/windows.h"
#include "models/vision_language.h"

namespace vlscope {

/// The gated MLP of a text block, with biases.
class GatedVisionMlp : public GatedMlp {
 public:
  GatedVisionMlp(Module* parent, std::string name, const VisionConfig& config)
      : GatedMlp(parent, std::move(name), kinds::vision_mlp,
                 {config.hidden_size, config.intermediate_size}, /*with_bias=*/true) {}
};

/// patches = patch_embed(pixels), put in the order of the windows; blocks, of which most attend
/// within a window and some within a frame; the projector; its image tokens put back in order.
class Qwen25VLVision : public VisionTower {
 public:
  Qwen25VLVision(Module* parent, std::string name, const VisionConfig& config, bool eager);
  Flow<VisionFeatures> operator()(Trace& trace, at::Tensor pixels,
                                  at::Tensor grid_thw) const override;

  PatchEmbed patch_embed;
  VisionRotary rotary_pos_emb;
  std::vector<std::unique_ptr<VisionLayer<RmsNorm, GatedVisionMlp>>> blocks;
  PatchMerger<RmsNorm> merger;

 private:
  at::Tensor in_window_order(const at::Tensor& rows, const WindowLayout& windows) const;
  bool sees_whole_frame(std::size_t block) const;

  std::vector<std::int64_t> full_attention_;
  std::int64_t merge_, window_side_;
};

class Qwen25VL : public VisionLanguageModel {
 public:
  Qwen25VL(const Config& config, Attention attention);
};

}  // namespace vlscope
