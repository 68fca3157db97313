#include "core/ops/problems.h"

#include <fmt/format.h>

#include <limits>
#include <stdexcept>

#include "core/ops/attention.h"

namespace vlscope::ops {
namespace {

programs::Strided strided(const at::Tensor& x) {
  if (!x.defined()) return {nullptr, 0, 0, 0};
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

int narrow(std::int64_t n) { return static_cast<int>(n); }

void lay(programs::AttentionProblem& problem, const at::Tensor& mask) {
  const at::Tensor all = mask.expand({problem.batch, problem.heads, problem.queries, problem.keys});
  problem.mask.query_stride = all.stride(2);
  problem.mask.key_stride = all.stride(3);
  problem.mask_batch = all.stride(0);
  problem.mask_head = all.stride(1);
  if (mask.scalar_type() == at::kBool) {
    problem.mask.allowed = mask.const_data_ptr<bool>();
  } else {
    problem.mask.additive = mask.const_data_ptr<float>();
  }
}

/// The strides of the last three axes but one, of which there may be fewer.
programs::RowStrides row_strides(const at::Tensor& x) {
  const auto at = [&](std::int64_t axis) { return x.dim() >= axis ? x.stride(-axis) : 0; };
  return {at(4), at(3), at(2)};
}

}  // namespace

at::Tensor with_adjacent_elements(const at::Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
}

at::Tensor laid_on_scores(const at::Tensor& mask) {
  return mask.scalar_type() == at::kBool ? mask : mask.to(at::kFloat);
}

bool has_programs(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

programs::Element element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return programs::Element::kFloat;
    case at::kBFloat16:
      return programs::Element::kBFloat16;
    case at::kHalf:
      return programs::Element::kHalf;
    default:
      throw std::logic_error(fmt::format("no program for {}", at::toString(dtype)));
  }
}

programs::AttentionProblem problem_of(const AttentionOperands& operands) {
  const at::Tensor &q = operands.q, &k = operands.k;
  programs::AttentionProblem problem{};
  problem.q = strided(q);
  problem.k = strided(k);
  problem.v = strided(operands.v);
  problem.out = strided(operands.out);
  problem.batch = narrow(q.size(0));
  problem.heads = narrow(q.size(1));
  problem.kv_heads = narrow(k.size(1));
  problem.queries = narrow(q.size(2));
  problem.keys = narrow(k.size(2));
  problem.head_dim = narrow(q.size(3));
  problem.scale = static_cast<float>(operands.scale);
  problem.window = narrow(operands.window);
  if (operands.mask.defined()) lay(problem, operands.mask);
  if (operands.bounds.defined()) {
    problem.bounds = operands.bounds.const_data_ptr<int>();
    problem.segments = narrow(operands.bounds.size(0) - 1);
  }
  return problem;
}

programs::PatternProblem problem_of(const PatternOperands& operands) {
  programs::PatternProblem problem{};
  problem.attention = problem_of(operands.attention);
  problem.heads = operands.heads.const_data_ptr<std::int64_t>();
  problem.queries = operands.queries.const_data_ptr<std::int64_t>();
  problem.head_count = narrow(operands.heads.size(0));
  problem.query_count = narrow(operands.queries.size(0));
  problem.out = operands.out.data_ptr();
  problem.width = narrow(operands.out.size(-1));
  problem.softmax = operands.softmax;
  problem.hidden = problem.attention.bounds
                       ? -std::numeric_limits<float>::infinity()
                       : static_cast<float>(least(operands.attention.q.scalar_type()));
  return problem;
}

programs::NormProblem norm_problem(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& out) {
  programs::NormProblem problem{};
  problem.x = x.const_data_ptr();
  problem.weight = weight.const_data_ptr();
  problem.out = out.data_ptr();
  problem.width = narrow(x.size(-1));
  problem.rows = x.numel() / x.size(-1);
  return problem;
}

programs::RotaryProblem problem_of(RotaryOperands& operands) {
  const at::Tensor& x = operands.x;
  auto rows = x.sizes().vec();
  rows.back() = operands.cos.size(-1);
  for (at::Tensor* table : {&operands.cos, &operands.sin}) {
    *table = table->contiguous().expand(rows);
  }
  // Of the same shape and contiguous before they were expanded alike, unless they were not.
  if (operands.cos.strides() != operands.sin.strides()) {
    operands.cos = operands.cos.contiguous();
    operands.sin = operands.sin.contiguous();
  }
  programs::RotaryProblem problem{};
  problem.x = x.const_data_ptr();
  problem.cos = operands.cos.const_data_ptr();
  problem.sin = operands.sin.const_data_ptr();
  problem.out = operands.out.data_ptr();
  problem.x_strides = row_strides(x);
  problem.table_strides = row_strides(operands.cos);
  problem.out_strides = row_strides(operands.out);
  const auto size = [&](std::int64_t axis) { return x.dim() >= axis ? x.size(-axis) : 1; };
  problem.outer = size(4);
  problem.middle = size(3);
  problem.inner = size(2);
  problem.width = narrow(x.size(-1));
  problem.turned = narrow(operands.cos.size(-1));
  problem.float_tables = operands.cos.scalar_type() == at::kFloat;
  return problem;
}

}  // namespace vlscope::ops
