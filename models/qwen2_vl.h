// Qwen2-VL: 2B to 72B. arXiv:2409.12191.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/text/qwen2.h"
#include "models/vision/patch_merger.h"
#include "models/vision_language.h"

namespace vlscope {

/// fc2(act(fc1(x))), act being x * sigmoid(1.702 x).
class Qwen2VLVisionMlp : public TwoLayerMlp {
 public:
  Qwen2VLVisionMlp(Module* parent, std::string name, const VisionConfig& config)
      : TwoLayerMlp(parent, std::move(name), config, {"fc1", "act", "fc2"}) {}
};

/// patches = patch_embed(pixels); blocks; the projector.
class Qwen2VLVision : public VisionTower {
 public:
  Qwen2VLVision(Module* parent, std::string name, const VisionConfig& config, bool eager);
  Flow<VisionFeatures> operator()(Trace& trace, at::Tensor pixels,
                                  at::Tensor grid_thw) const override;

  PatchEmbed patch_embed;
  VisionRotary rotary_pos_emb;
  std::vector<std::unique_ptr<VisionLayer<LayerNorm, Qwen2VLVisionMlp>>> blocks;
  PatchMerger<LayerNorm> merger;

 private:
  std::int64_t merge_;
};

class Qwen2VL : public VisionLanguageModel {
 public:
  Qwen2VL(const Config& config, Attention attention);
};

}  // namespace vlscope
