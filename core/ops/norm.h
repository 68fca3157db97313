// Root mean square norms, in the reference's operations and their order.
#pragma once

#include <ATen/core/Tensor.h>

namespace vlscope::ops {

/// x / sqrt(mean(x^2) + eps) along the last axis, in float32 (float64 stays what it is).
at::Tensor normalised(const at::Tensor& x, double eps);

enum class NormForm { kPlain, kZeroCentered };

/// weight * normalised(x), cast back before the weight (arXiv:1910.07467); or, zero-centred,
/// (1 + weight) * normalised(x), cast back at the end. On CUDA by a kernel of its own where there
/// is one (core/ops/torch_ops.h), on the CPU in one pass where that has the same bits
/// (core/ops/one_pass.h).
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormForm form);

/// Each by torch's operations alone.
at::Tensor composed_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor composed_zero_centered_rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                           double eps);

}  // namespace vlscope::ops
