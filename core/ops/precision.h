// Rules that the arithmetic of every part keeps.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

namespace vlscope::ops {

/// What statistics (norms, softmax, rotary, recurrences) are taken in for inputs of this dtype:
/// float32. float64 stays what it is: the reference's cast is there for half precision.
inline at::ScalarType precise(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// True if an operation on these tensors becomes part of a gradient graph.
template <class... Tensors>
bool records_graph(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

/// `x`, or a copy of it while a graph is recorded: for what an operation keeps for its backward
/// pass, which an edit of the served value must not reach.
inline at::Tensor apart_from_graph(const at::Tensor& x) {
  return x.requires_grad() ? x.clone() : x;
}

}  // namespace vlscope::ops
