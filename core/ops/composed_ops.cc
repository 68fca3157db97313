#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <limits>

#include "core/ops/norm.h"
#include "core/ops/rotary.h"
#include "core/ops/torch_ops.h"

namespace vlscope::ops {
namespace {

/// The bounds of the segments, on the host.
std::vector<std::int64_t> bounds_of(const at::Tensor& cu_seqlens) {
  const at::Tensor host = cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const auto* first = host.const_data_ptr<std::int64_t>();
  return {first, first + host.numel()};
}

/// `[rows, heads, head_dim]` -> `[1, heads, n, head_dim]` of one segment.
at::Tensor segment(const at::Tensor& x, std::int64_t begin, std::int64_t end) {
  return x.narrow(0, begin, end - begin).transpose(0, 1).unsqueeze(0);
}

/// The causal rule for queries at the end of the keys, as a mask; `window` as in
/// programs::Causal. Undefined where the fused kernels know it by themselves.
at::Tensor causal_rule(const at::Tensor& q, const at::Tensor& k, std::int64_t window) {
  const std::int64_t queries = q.size(2), keys = k.size(2);
  if (window == 0 && (queries == 1 || queries == keys)) return {};
  const at::Tensor key = at::arange(keys, q.options().dtype(at::kLong));
  const at::Tensor query = key.narrow(0, keys - queries, queries).unsqueeze(1);
  at::Tensor allowed = key <= query;
  if (window > 0) allowed = allowed & (key > query - window);
  return allowed.unsqueeze(0).unsqueeze(0);
}

at::Tensor mask_of(const at::Tensor& given, const at::Tensor& q, const at::Tensor& k,
                   std::int64_t window) {
  if (!given.defined()) return causal_rule(q, k, window);
  return given.scalar_type() == at::kBool ? given : given.to(q.scalar_type());
}

}  // namespace

namespace composed {

at::Tensor segmented_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& cu_seqlens, double scale) {
  arguments::check_segmented(q, k, cu_seqlens);
  arguments::check_segmented(q, v, cu_seqlens);
  const std::vector<std::int64_t> bounds = bounds_of(cu_seqlens);
  std::vector<at::Tensor> heads;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    const std::int64_t begin = bounds[i], end = bounds[i + 1];
    if (begin == end) continue;
    heads.push_back(fused_attention(segment(q, begin, end), segment(k, begin, end),
                                    segment(v, begin, end), {}, /*causal=*/false, scale)
                        .squeeze(0));
  }
  if (heads.empty()) return q.clone();
  return at::cat(heads);
}

at::Tensor segmented_attention_rows(const arguments::SegmentedRows& in) {
  arguments::check(in);
  const std::vector<std::int64_t> bounds = bounds_of(in.cu_seqlens);
  const at::Tensor heads = at::tensor(in.rows.heads, in.q.options().dtype(at::kLong));
  const double outside = in.probabilities ? 0 : -std::numeric_limits<double>::infinity();
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  at::Tensor out = at::full({count(in.rows.heads), count(in.rows.queries), in.max_seqlen}, outside,
                            in.q.options());
  for (std::int64_t i = 0; i < count(in.rows.queries); ++i) {
    const std::int64_t row = in.rows.queries[i];
    const auto after = std::upper_bound(bounds.begin(), bounds.end(), row);
    const std::int64_t begin = *(after - 1), length = *after - begin;
    const at::Tensor query = in.q.select(0, row).index_select(0, heads).unsqueeze(1);
    const at::Tensor keys = in.k.narrow(0, begin, length).index_select(1, heads).permute({1, 2, 0});
    at::Tensor pattern = at::matmul(query, keys).squeeze(1) * in.scale;
    if (in.probabilities) pattern = attention_probabilities(pattern);
    out.select(1, i).narrow(1, 0, length).copy_(pattern);
  }
  return out;
}

at::Tensor causal_attention(const arguments::Causal& in) {
  arguments::check(in);
  const at::Tensor mask = mask_of(in.mask, in.q, in.k, in.window);
  return fused_attention(in.q, in.k, in.v, mask, /*causal=*/true, in.scale);
}

at::Tensor causal_attention_rows(const arguments::CausalRows& in) {
  arguments::check(in);
  at::Tensor mask = mask_of(in.mask, in.q, in.k, in.window);
  if (mask.defined()) {
    mask = mask.expand({mask.size(0), mask.size(1), in.q.size(2), in.k.size(2)});
    if (mask.size(1) > 1) {
      mask = mask.index_select(1, at::tensor(in.rows.heads, mask.options().dtype(at::kLong)));
    }
  }
  const at::Tensor scores = composed_score_rows(in.q, in.k, mask, in.scale, in.rows);
  return in.probabilities ? attention_probabilities(scores) : scores;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered) {
  return zero_centered ? composed_zero_centered_rms_norm(x, weight, eps)
                       : composed_rms_norm(x, weight, eps);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return composed_rotate(x.to(c10::promoteTypes(x.scalar_type(), cos.scalar_type())), cos, sin)
      .to(x.scalar_type());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

}  // namespace composed
}  // namespace vlscope::ops
