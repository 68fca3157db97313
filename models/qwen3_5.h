// Qwen3.5, the dense line and that of mixtures: three of four blocks recurrent (Gated DeltaNet,
// arXiv:2412.06464), every fourth a gated softmax attention; norms with gain 1 + w; M-RoPE on a
// quarter of each head.
#pragma once

#include <optional>

#include "models/qwen3_vl.h"
#include "models/vision_language.h"

namespace vlscope {

/// The tower of Qwen3-VL without taps.
class Qwen3_5Vision : public Qwen3VLVision {
 public:
  using Qwen3VLVision::Qwen3VLVision;
  std::optional<std::size_t> deepstack_levels() const override { return std::nullopt; }
};

class Qwen3_5 : public VisionLanguageModel {
 public:
  Qwen3_5(const Config& config, Attention attention);
};

/// With a mixture of experts and a shared expert for the MLP of every block: 35B-A3B to 397B-A17B.
class Qwen3_5Moe : public VisionLanguageModel {
 public:
  Qwen3_5Moe(const Config& config, Attention attention);
};

}  // namespace vlscope
