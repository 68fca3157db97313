#include "core/ops/linear.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <optional>

#include "core/ops/precision.h"

namespace vlscope::ops {
namespace {

/// Numbers of W that are worth a thread of their own.
constexpr std::int64_t kWorthAThread = 1 << 19;
/// Rows of W that stay together: a kernel takes as many at a time, and fewer go another way, which
/// rounds otherwise.
constexpr std::int64_t kTogether = 64;

bool is_large_product_of_a_row(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
         x.dim() >= 2 && x.numel() == x.size(-1) && weight.is_contiguous() &&
         weight.size(0) >= kTogether && weight.numel() >= 2 * kWorthAThread &&
         !records_graph(x, weight);
}

at::Tensor by_threads(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor row = x.reshape({1, -1});
  const std::int64_t out = weight.size(0), groups = out / kTogether;
  at::Tensor y = at::empty({1, out}, x.options());
  const std::int64_t grain = std::max<std::int64_t>(1, kWorthAThread / weight.size(1) / kTogether);
  at::parallel_for(0, groups, grain, [&](std::int64_t begin, std::int64_t end) {
    const at::NoGradGuard no_grad;  // Another thread has a mode of its own.
    const std::int64_t first = begin * kTogether;
    const std::int64_t count = (end == groups ? out : end * kTogether) - first;
    at::Tensor part = y.narrow(1, first, count);
    const at::Tensor columns = weight.narrow(0, first, count).t();
    if (bias.defined()) {
      at::addmm_out(part, bias.narrow(0, first, count), row, columns);
    } else {
      at::mm_out(part, row, columns);
    }
  });
  auto shape = x.sizes().vec();
  shape.back() = out;
  return y.view(shape);
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (is_large_product_of_a_row(x, weight) && at::get_num_threads() > 1) {
    return by_threads(x, weight, bias);
  }
  return at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

}  // namespace vlscope::ops
