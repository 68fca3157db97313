#include "core/large_weight.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>

namespace vlscope {

at::Tensor LargeWeight::matrix(const at::Tensor& x) const {
  if (stream && block >= 0) stream->enter(block);
  return widens() ? stream->widened(stored, x) : stored;
}

at::Tensor LargeWeight::expert(std::int64_t index, std::int64_t count, const at::Tensor& x) const {
  if (parts.empty() && !widens()) return stored.select(0, index);
  std::vector<at::Tensor> pieces;
  if (parts.empty()) {
    pieces.push_back(stored.select(0, index));
  } else {
    const auto each = static_cast<std::int64_t>(parts.size()) / count;
    pieces.assign(parts.begin() + index * each, parts.begin() + (index + 1) * each);
  }
  for (const at::Tensor& piece : pieces) WeightStream::read_ahead(piece);
  // As far into a line of the cache as in the one tensor that other models have.
  const std::size_t bytes = pieces.size() * pieces.front().numel() * c10::elementSize(dtype());
  return stream->widened(pieces, x, index * bytes);
}

at::Tensor LargeWeight::rows(const at::Tensor& indices) const {
  return at::embedding(stored, indices).to(dtype());
}

}  // namespace vlscope
