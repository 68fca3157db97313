#include "core/ops/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rsqrt.h>

#include "core/ops/precision.h"

namespace vlscope::ops {

at::Tensor normalised(const at::Tensor& x, double eps) {
  const at::Tensor statistics = x.to(precise(x.scalar_type()));
  return statistics * at::rsqrt(statistics.pow(2).mean(-1, /*keepdim=*/true) + eps);
}

at::Tensor composed_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return weight * normalised(x, eps).to(x.scalar_type());
}

at::Tensor composed_zero_centered_rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                           double eps) {
  const at::Tensor y = normalised(x, eps);
  return (y * (1.0 + weight.to(y.scalar_type()))).to(x.scalar_type());
}

}  // namespace vlscope::ops
