// Qwen3-VL, the dense line: 2B to 32B, Instruct and Thinking. arXiv:2511.21631.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/vision_language.h"

namespace vlscope {

/// patches = patch_embed(pixels) + resampled pos_embed; blocks; after each tapped block its
/// DeepStack merger; the projector last.
class Qwen3VLVision : public VisionTower {
 public:
  Qwen3VLVision(Module* parent, std::string name, const VisionConfig& config, bool eager);
  Flow<VisionFeatures> operator()(Trace& trace, at::Tensor pixels,
                                  at::Tensor grid_thw) const override;
  std::optional<std::size_t> deepstack_levels() const override { return taps_.size(); }

  PatchEmbed patch_embed;
  Embedding pos_embed;
  VisionRotary rotary_pos_emb;
  std::vector<std::unique_ptr<VisionLayer<LayerNorm, VisionMlp>>> blocks;
  Merger merger;
  std::vector<std::unique_ptr<Merger>> deepstack_merger_list;

 private:
  Flow<at::Tensor> embed(Trace& trace, at::Tensor pixels, const std::vector<Grid>& grids) const;
  const Merger* tap_after(std::size_t block) const;

  std::vector<std::int64_t> taps_;
  std::int64_t merge_, table_side_;
};

class Qwen3VL : public VisionLanguageModel {
 public:
  Qwen3VL(const Config& config, Attention attention);
};

}  // namespace vlscope
