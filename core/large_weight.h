#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/weight_stream.h"

namespace vlscope {

/// A weight that a model which streams keeps as it is stored: a matrix `[out, in]`, or those of all
/// experts, `[experts, out, in]`. In every other model it is a tensor as others are.
struct LargeWeight {
  at::Tensor stored;
  /// In place of `stored`, for experts that are stored one by one: expert after expert, part after
  /// part. Of a model that streams.
  std::vector<at::Tensor> parts = {};
  const WeightStream* stream = nullptr;  ///< The model's, if it streams.
  int block = -1;                        ///< Of the stream, if the block begins with this weight.

  /// What the forward runs in.
  at::ScalarType dtype() const { return stream ? stream->dtype() : stored.scalar_type(); }
  /// The matrix for an operation with `x`, which must not outlive it: see WeightStream::widened.
  at::Tensor matrix(const at::Tensor& x) const;
  /// The same for the matrix of one of `count` experts; no byte of another is touched.
  at::Tensor expert(std::int64_t index, std::int64_t count, const at::Tensor& x) const;
  /// Rows of the matrix, `[..., in]` for `indices` `[...]`; no other row is widened.
  at::Tensor rows(const at::Tensor& indices) const;

 private:
  bool widens() const { return stream && stored.scalar_type() != stream->dtype(); }
};

}  // namespace vlscope
