// Qwen3-VL with mixtures of experts: 30B-A3B and 235B-A22B, Instruct and Thinking.
// arXiv:2511.21631.
#pragma once

#include "models/vision_language.h"

namespace vlscope {

/// Qwen3-VL, whose blocks have a mixture for their MLP, but for those that the config keeps dense.
class Qwen3VLMoe : public VisionLanguageModel {
 public:
  Qwen3VLMoe(const Config& config, Attention attention);
};

}  // namespace vlscope
