#include "core/ops/rotary.h"

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/pow.h>

namespace vlscope::ops {
namespace {

at::Tensor rotate_half(const at::Tensor& x) {
  const std::int64_t half = x.size(-1) / 2;
  return at::cat({-x.narrow(-1, half, x.size(-1) - half), x.narrow(-1, 0, half)}, -1);
}

/// Folds tables of the three axes `[3, batch, seq, frequencies]` into one, and doubles it.
at::Tensor interleave_axes(const at::Tensor& table, const std::vector<std::int64_t>& section) {
  using at::indexing::Slice;
  at::Tensor folded = table[0];
  for (std::int64_t axis = 1; axis < 3; ++axis) {
    const Slice frequencies(axis, section[axis] * 3, 3);
    folded.index({at::indexing::Ellipsis, frequencies})
        .copy_(table[axis].index({at::indexing::Ellipsis, frequencies}));
  }
  return at::cat({folded, folded}, -1);
}

/// The same, by sections.
at::Tensor join_axes(const at::Tensor& table, const std::vector<std::int64_t>& section) {
  std::vector<at::Tensor> parts = table.split_with_sizes(section, -1);
  for (std::size_t axis = 0; axis < parts.size(); ++axis) {
    parts[axis] = parts[axis][static_cast<std::int64_t>(axis)];
  }
  const at::Tensor folded = at::cat(parts, -1);
  return at::cat({folded, folded}, -1);
}

/// `[3, batch, seq, frequencies]`.
at::Tensor mrope_angles(const at::Tensor& positions, const at::Tensor& inverse_frequencies) {
  const at::Tensor frequencies =
      inverse_frequencies.view({1, 1, -1, 1})
          .expand({3, positions.size(1), inverse_frequencies.size(0), 1});
  return at::matmul(frequencies, positions.unsqueeze(2).to(at::kFloat)).transpose(2, 3);
}

at::Tensor both_axes(const at::Tensor& table) {
  const at::Tensor row_column = at::cat({table.select(1, 0), table.select(1, 1)}, -1);
  return at::cat({row_column, row_column}, -1);
}

}  // namespace

at::Tensor inverse_frequencies(double theta, std::int64_t dim) {
  const at::Tensor exponents = at::arange(0, dim, 2, at::kFloat) / static_cast<double>(dim);
  return at::pow(theta, exponents).reciprocal();
}

at::Tensor composed_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t turned = cos.size(-1), left = x.size(-1) - turned;
  if (left == 0) return x * cos + rotate_half(x) * sin;
  const at::Tensor first = x.narrow(-1, 0, turned);
  return at::cat({first * cos + rotate_half(first) * sin, x.narrow(-1, turned, left)}, -1);
}

std::pair<at::Tensor, at::Tensor> interleaved_mrope(const at::Tensor& positions,
                                                    const at::Tensor& inverse_frequencies,
                                                    const std::vector<std::int64_t>& section,
                                                    at::ScalarType dtype) {
  const at::Tensor angles = mrope_angles(positions, inverse_frequencies);
  return {interleave_axes(angles.cos(), section).to(dtype),
          interleave_axes(angles.sin(), section).to(dtype)};
}

std::pair<at::Tensor, at::Tensor> sectioned_mrope(const at::Tensor& positions,
                                                  const at::Tensor& inverse_frequencies,
                                                  const std::vector<std::int64_t>& section,
                                                  at::ScalarType dtype) {
  const at::Tensor angles = mrope_angles(positions, inverse_frequencies);
  return {join_axes(angles.cos(), section).to(dtype), join_axes(angles.sin(), section).to(dtype)};
}

std::pair<at::Tensor, at::Tensor> axial_rope(const at::Tensor& coordinates,
                                             const at::Tensor& inverse_frequencies) {
  const at::Tensor angles = coordinates.unsqueeze(-1).to(at::kFloat) * inverse_frequencies;
  return {both_axes(angles.cos()), both_axes(angles.sin())};
}

}  // namespace vlscope::ops
