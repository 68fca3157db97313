#include "core/ops/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <limits>

#include "core/device.h"
#include "core/ops/precision.h"

namespace vlscope::ops {
namespace {

/// Heads that share keys can be grouped by the kernel itself, unless there is a mask.
bool can_group(const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask) {
  return !mask.defined() && k.size(-1) == v.size(-1) && k.size(-1) <= 256;
}

/// @param mask additive, or boolean with True where a query may look
at::Tensor masked(const at::Tensor& scores, const at::Tensor& mask) {
  if (mask.scalar_type() != at::kBool) return scores + mask;
  return scores + additive_mask(on_device(mask, scores.device()), scores.scalar_type());
}

/// Rows of the causal mask of `queries` that stand at the end of `keys`: `[1, 1, rows, keys]`.
at::Tensor causal_rows(const at::Tensor& rows, std::int64_t queries, std::int64_t keys) {
  const at::Tensor last_visible = (rows + (keys - queries)).unsqueeze(1);
  return (at::arange(keys, rows.options()) <= last_visible).unsqueeze(0).unsqueeze(0);
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
  if (mask.defined()) return masked(scores, mask);
  const at::Tensor unpadded = at::ones({1, k.size(2)}, k.options().dtype(at::kLong));
  return masked(scores, causal_mask(unpadded, q.size(2)));
}

at::Tensor composed_score_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                               double scale, const RowChoice& rows) {
  const at::Tensor index = on_device(at::tensor(rows.queries), q.device());
  const std::int64_t group = q.size(1) / k.size(1);
  std::vector<at::Tensor> scores;
  for (const std::int64_t head : rows.heads) {
    const at::Tensor queries = q.select(1, head).index_select(1, index);
    scores.push_back(at::matmul(queries, k.select(1, head / group).transpose(1, 2)) * scale);
  }
  const at::Tensor allowed = mask.defined() ? mask.index_select(2, on_device(index, mask.device()))
                                            : causal_rows(index, q.size(2), k.size(2));
  return masked(at::stack(scores, 1), allowed);
}

at::Tensor attention_probabilities(const at::Tensor& scores) {
  return at::softmax(scores, -1, precise(scores.scalar_type())).to(scores.scalar_type());
}

at::Tensor attend(const at::Tensor& probabilities, const at::Tensor& v) {
  return at::matmul(probabilities, repeat_heads(v, probabilities.size(1)))
      .transpose(1, 2)
      .contiguous();
}

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& mask, bool causal, double scale) {
  const bool shared = k.size(1) != q.size(1);
  const bool grouped = shared && can_group(k, v, mask);
  const at::Tensor keys = shared && !grouped ? repeat_heads(k, q.size(1)) : k;
  const at::Tensor values = shared && !grouped ? repeat_heads(v, q.size(1)) : v;
  const std::optional<at::Tensor> bias = mask.defined() ? std::optional(mask) : std::nullopt;
  const at::Tensor heads =
      at::scaled_dot_product_attention(q, keys, values, bias, /*dropout_p=*/0.0,
                                       causal && !mask.defined() && q.size(2) > 1, scale, grouped)
          .transpose(1, 2);
  // The kernels keep their result for the backward pass; an edit must not reach that.
  return heads.requires_grad() ? heads.clone(at::MemoryFormat::Contiguous) : heads.contiguous();
}

at::Tensor causal_mask(const at::Tensor& attention_mask, std::int64_t queries) {
  const std::int64_t n = attention_mask.size(1);
  const at::Tensor key = at::arange(n, attention_mask.options());
  const at::Tensor query = key.narrow(0, n - queries, queries);
  const at::Tensor before = key.unsqueeze(0) <= query.unsqueeze(1);
  const at::Tensor real = attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1);
  return before & real;
}

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

at::Tensor additive_mask(const at::Tensor& allowed, at::ScalarType dtype) {
  const at::TensorOptions options = allowed.options().dtype(dtype);
  return at::where(allowed, at::scalar_tensor(0.0, options),
                   at::scalar_tensor(least(dtype), options));
}

}  // namespace vlscope::ops
