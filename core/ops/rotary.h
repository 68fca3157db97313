// Rotary embeddings: frequency tables and their application, by halves (x1, x2) -> (-x2, x1).
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace vlscope::ops {

/// 1 / theta^(2k/dim) for k = 0 .. dim/2 - 1, float32. RoFormer (arXiv:2104.09864), section 3.2.2.
at::Tensor inverse_frequencies(double theta, std::int64_t dim);

/// x * cos + rotate_half(x) * sin, in the dtype of `x`; cos and sin broadcast against it. Where
/// they are narrower than `x`, its first elements are turned and the others left as they are.
/// On CUDA by a kernel of its own where there is one (core/ops/torch_ops.h), on the CPU in one pass
/// where that has the same bits (core/ops/one_pass.h).
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// The same by torch's operations alone.
at::Tensor composed_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// cos and sin `[batch, seq, 2 * frequencies]` of multimodal positions `[3, batch, seq]` (time,
/// height, width), interleaved: of the frequencies k = 1, 4, 7, ... the first `section[1]` turn by
/// the height, of k = 2, 5, 8, ... the first `section[2]` by the width, all others by the time.
/// Computed in float32, returned as `dtype`.
std::pair<at::Tensor, at::Tensor> interleaved_mrope(const at::Tensor& positions,
                                                    const at::Tensor& inverse_frequencies,
                                                    const std::vector<std::int64_t>& section,
                                                    at::ScalarType dtype);

/// The same by sections: the first `section[0]` frequencies turn by the time, the next `section[1]`
/// by the height, the last `section[2]` by the width.
std::pair<at::Tensor, at::Tensor> sectioned_mrope(const at::Tensor& positions,
                                                  const at::Tensor& inverse_frequencies,
                                                  const std::vector<std::int64_t>& section,
                                                  at::ScalarType dtype);

/// cos and sin `[patches, 4 * frequencies]` of patch coordinates `[patches, 2]` (row, column):
/// the row's angles, then the column's, and both once more. float32.
std::pair<at::Tensor, at::Tensor> axial_rope(const at::Tensor& coordinates,
                                             const at::Tensor& inverse_frequencies);

}  // namespace vlscope::ops
