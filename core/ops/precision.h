// Two rules that the arithmetic of every part keeps.
#pragma once

#include <ATen/core/Tensor.h>

namespace vlscope::ops {

/// What statistics (norms, softmax, rotary, recurrences) are taken in for inputs of this dtype:
/// float32. float64 stays what it is: the reference's cast is there for half precision.
inline at::ScalarType precise(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// `x`, or a copy of it while a graph is recorded: for what an operation keeps for its backward
/// pass, which an edit of the served value must not reach.
inline at::Tensor apart_from_graph(const at::Tensor& x) {
  return x.requires_grad() ? x.clone() : x;
}

}  // namespace vlscope::ops
