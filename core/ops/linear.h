// The linear map.
#pragma once

#include <ATen/core/Tensor.h>

namespace vlscope::ops {

/// y = x W^T + b, with x `[..., in]`, W `[out, in]`, and b `[out]` or undefined. The bits of
/// at::linear. On the CPU, the product of a single row with a large matrix is divided among the
/// threads: it takes as long as W takes to be read, and torch's own reads it with one thread.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace vlscope::ops
