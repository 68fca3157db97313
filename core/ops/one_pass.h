// Norms and rotations on the CPU in one pass over the rows, where the composed operations take
// seven. Every number is rounded where those round it, and sums are torch's own, so that the
// results have the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/ops/norm.h"

namespace vlscope::ops::one_pass {

/// True where `rms_norm` may stand for the composed norm: float32 on the CPU, rows side by side,
/// and no graph recorded.
bool norms(const at::Tensor& x, const at::Tensor& weight);
/// See ops::rms_norm.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormForm form);

/// True where `rotate` may stand for composed_rotate: float32 on the CPU, elements of a row side by
/// side, at most three axes before them, and no graph recorded.
bool rotates(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
/// See ops::rotate.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace vlscope::ops::one_pass
