// What a recording keeps of one forward, so that later traces of the prompt start in the middle.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/text/cache.h"

namespace vlscope {

/// What the tower gives the text model: merged patches for the scatter, and one set for each
/// DeepStack level, all `[image_tokens + video_tokens, hidden]` with those of the images first.
struct VisionFeatures {
  at::Tensor merged;
  std::vector<at::Tensor> deepstack;
};

/// Everything that the blocks of the text model were given. Filled by one forward, read by many.
struct Recording {
  VisionFeatures vision;
  /// `[batch, seq, hidden]` entering each text block, and last what entered the final norm.
  std::vector<at::Tensor> streams;
  /// What every block remembers, or nullptr if that was not asked for.
  std::shared_ptr<KeyValueCache> keys;

  /// Every tensor held.
  std::vector<at::Tensor> tensors() const;
  std::int64_t nbytes() const;
};

}  // namespace vlscope
