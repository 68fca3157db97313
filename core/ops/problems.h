// From tensors to what a launch takes. Whoever launches keeps the tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/ops/launch.h"

namespace vlscope::ops {

/// `x`, or a copy of it, with the elements of each row side by side.
at::Tensor with_adjacent_elements(const at::Tensor& x);

/// True for what the programs compute in: float32, bfloat16 and float16.
bool has_programs(at::ScalarType dtype);
/// @throws std::logic_error for a dtype that has no programs
programs::Element element_of(at::ScalarType dtype);

/// A mask as AttentionOperands takes it: booleans, or numbers as float32.
at::Tensor laid_on_scores(const at::Tensor& mask);

struct AttentionOperands {
  at::Tensor q, k, v;      ///< `[batch, heads, n, head_dim]`, elements of a row side by side
  at::Tensor out;          ///< like q
  at::Tensor mask = {};    ///< bool or float32, broadcasting to `[batch, heads, queries, keys]`
  at::Tensor bounds = {};  ///< int32 `[segments + 1]`; undefined under the causal rule
  double scale = 1;
  std::int64_t window = 0;  ///< See programs::Causal.
};
programs::AttentionProblem problem_of(const AttentionOperands& operands);

struct PatternOperands {
  AttentionOperands attention;  ///< without values
  at::Tensor heads, queries;    ///< int64
  at::Tensor out;               ///< `[batch, heads, queries, width]`, contiguous
  bool softmax;
};
programs::PatternProblem problem_of(const PatternOperands& operands);

/// @param x,out contiguous
programs::NormProblem norm_problem(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& out);

struct RotaryOperands {
  at::Tensor x, cos, sin, out;  ///< x and out `[..., head_dim]` with at most three axes before it
};
/// Tables are expanded to the rows of x, and copied where their elements do not lie side by side:
/// they are put back into `operands`, which must live as long as the problem.
programs::RotaryProblem problem_of(RotaryOperands& operands);

}  // namespace vlscope::ops
