#include "core/ops/one_pass.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>

#include "core/ops/precision.h"
#include "core/ops/problems.h"

namespace vlscope::ops::one_pass {
namespace {

/// Numbers that one thread takes at least: fewer are not worth waking another.
constexpr std::int64_t kGrain = 32768;

bool plain(const at::Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat; }

/// Calls `run(row)` for each of `rows` rows of `width` numbers, some threads at a time.
template <class Run>
void for_each_row(std::int64_t rows, std::int64_t width, Run run) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width));
  at::parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) run(row);
  });
}

// The loops below are compiled without contraction of a product and a sum into one rounding
// (core/BUILD.bazel).

void square(const float* x, float* out, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = x[i] * x[i];
}

void scale_plain(const float* x, float scale, const float* weight, float* out, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = weight[i] * (x[i] * scale);
}

void scale_zero_centred(const float* x, float scale, const float* weight, float* out,
                        std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = (x[i] * scale) * (1.0f + weight[i]);
}

void rotate_row(const programs::RotaryRow<float, float>& row) {
  const float *x = row.x, *cos = row.cos, *sin = row.sin;
  const int half = row.turned / 2;
  for (int i = 0; i < half; ++i) row.out[i] = x[i] * cos[i] + -x[i + half] * sin[i];
  for (int i = half; i < row.turned; ++i) row.out[i] = x[i] * cos[i] + x[i - half] * sin[i];
  std::copy(x + row.turned, x + row.width, row.out + row.turned);
}

}  // namespace

bool norms(const at::Tensor& x, const at::Tensor& weight) {
  return plain(x) && plain(weight) && x.is_contiguous() && weight.is_contiguous() &&
         !records_graph(x, weight);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormForm form) {
  const std::int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
  const auto* from = x.const_data_ptr<float>();
  const auto* weights = weight.const_data_ptr<float>();
  at::Tensor out = at::empty_like(x);
  auto* to = out.mutable_data_ptr<float>();
  for_each_row(rows, width,
               [&](std::int64_t i) { square(from + i * width, to + i * width, width); });
  const at::Tensor sums = at::sum(out, -1);
  const auto* sum = sums.const_data_ptr<float>();
  const auto count = static_cast<float>(width), room = static_cast<float>(eps);
  const auto scale_row = form == NormForm::kPlain ? scale_plain : scale_zero_centred;
  for_each_row(rows, width, [&](std::int64_t i) {
    const float scale = 1.0f / std::sqrt(sum[i] / count + room);
    scale_row(from + i * width, scale, weights, to + i * width, width);
  });
  return out;
}

bool rotates(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto adjacent = [](const at::Tensor& t) { return t.stride(-1) == 1; };
  return plain(x) && plain(cos) && plain(sin) && x.dim() <= 4 && adjacent(x) && adjacent(cos) &&
         adjacent(sin) && !records_graph(x, cos, sin);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const bool whole = cos.size(-1) == x.size(-1);
  // Where only a part is turned, the composed operations put the parts together anew.
  at::Tensor out =
      at::empty_like(x, whole ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
  RotaryOperands operands{x, cos, sin, out};
  const programs::RotaryProblem problem = problem_of(operands);
  const std::int64_t rows = problem.outer * problem.middle * problem.inner;
  for_each_row(rows, problem.width, [&](std::int64_t row) {
    rotate_row(programs::rotary_row<float, float>(problem, row));
  });
  return out;
}

}  // namespace vlscope::ops::one_pass
