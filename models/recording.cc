#include "models/recording.h"

namespace vlscope {

std::vector<at::Tensor> Recording::tensors() const {
  std::vector<at::Tensor> held = streams;
  if (vision.merged.defined()) held.push_back(vision.merged);
  held.insert(held.end(), vision.deepstack.begin(), vision.deepstack.end());
  for (std::size_t k = 0; keys && k < keys->size(); ++k) {
    const std::vector<at::Tensor> block = keys->block(k).tensors();
    held.insert(held.end(), block.begin(), block.end());
  }
  return held;
}

std::int64_t Recording::nbytes() const {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors()) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace vlscope
