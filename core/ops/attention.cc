#include "core/ops/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>

#include <limits>

namespace vlscope::ops {
namespace {

double least(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return std::numeric_limits<at::Half>::lowest();
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::lowest();
    case at::kDouble:
      return std::numeric_limits<double>::lowest();
    default:
      return std::numeric_limits<float>::lowest();
  }
}

/// Heads that share keys can be grouped by the kernel itself, unless there is a mask.
bool can_group(const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask) {
  return !mask.defined() && k.size(-1) == v.size(-1) && k.size(-1) <= 256;
}

}  // namespace

at::Tensor repeat_heads(const at::Tensor& x, std::int64_t heads) {
  const std::int64_t batch = x.size(0), kv_heads = x.size(1), n = x.size(2), d = x.size(3);
  if (heads == kv_heads) return x;
  return x.unsqueeze(2)
      .expand({batch, kv_heads, heads / kv_heads, n, d})
      .reshape({batch, heads, n, d});
}

at::Tensor full_scores(const at::Tensor& q, const at::Tensor& k, double scale) {
  return at::matmul(q, repeat_heads(k, q.size(1)).transpose(2, 3)) * scale;
}

at::Tensor attention_scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                            double scale) {
  const at::Tensor scores = full_scores(q, k, scale);
  if (mask.defined() && mask.scalar_type() != at::kBool) return scores + mask;
  const at::Tensor allowed =
      mask.defined() ? mask : causal_mask(at::ones({1, k.size(2)}, at::kLong), q.size(2));
  return scores + additive_mask(allowed, scores.scalar_type()).to(scores.device());
}

at::Tensor attention_probabilities(const at::Tensor& scores) {
  // float64 stays what it is: the reference's cast is there for half precision.
  const at::ScalarType precise = scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::softmax(scores, -1, precise).to(scores.scalar_type());
}

at::Tensor attend(const at::Tensor& probabilities, const at::Tensor& v) {
  return at::matmul(probabilities, repeat_heads(v, probabilities.size(1)))
      .transpose(1, 2)
      .contiguous();
}

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& mask, bool causal, double scale) {
  // torch's own rule for shapes alone is written in Python, and may not be there.
  if (q.is_meta()) return at::empty_like(q.transpose(1, 2), at::MemoryFormat::Contiguous);
  const bool shared = k.size(1) != q.size(1);
  const bool grouped = shared && can_group(k, v, mask);
  const at::Tensor keys = shared && !grouped ? repeat_heads(k, q.size(1)) : k;
  const at::Tensor values = shared && !grouped ? repeat_heads(v, q.size(1)) : v;
  const std::optional<at::Tensor> bias = mask.defined() ? std::optional(mask) : std::nullopt;
  return at::scaled_dot_product_attention(q, keys, values, bias, /*dropout_p=*/0.0,
                                          causal && !mask.defined() && q.size(2) > 1, scale,
                                          grouped)
      .transpose(1, 2)
      .contiguous();
}

at::Tensor causal_mask(const at::Tensor& attention_mask, std::int64_t queries) {
  const std::int64_t n = attention_mask.size(1);
  const at::Tensor key = at::arange(n, attention_mask.options());
  const at::Tensor query = key.narrow(0, n - queries, queries);
  const at::Tensor before = key.unsqueeze(0) <= query.unsqueeze(1);
  const at::Tensor real = attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1);
  return before & real;
}

at::Tensor additive_mask(const at::Tensor& allowed, at::ScalarType dtype) {
  const at::TensorOptions options = allowed.options().dtype(dtype);
  return at::where(allowed, at::scalar_tensor(0.0, options),
                   at::scalar_tensor(least(dtype), options));
}

}  // namespace vlscope::ops
