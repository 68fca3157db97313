// Attention arithmetic of both towers, in the reference's operations and their order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace vlscope::ops {

/// Repeats each key/value head for the query heads that share it: query head j uses head
/// j / (heads / kv_heads). `[batch, kv_heads, n, d]` -> `[batch, heads, n, d]`.
at::Tensor repeat_heads(const at::Tensor& x, std::int64_t heads);

/// scores = q k^T * scale + mask, `[batch, heads, queries, keys]`.
/// @param mask additive, or boolean with True where a query may look, or undefined for causal
/// (the queries are the last positions of the keys).
at::Tensor attention_scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                            double scale);

/// scores = q k^T * scale, every query looking at every key.
at::Tensor full_scores(const at::Tensor& q, const at::Tensor& k, double scale);

/// Which rows of a pattern: every one of `queries` of every one of `heads`, in the order given.
struct RowChoice {
  std::vector<std::int64_t> heads;    ///< Query heads, from 0.
  std::vector<std::int64_t> queries;  ///< From 0; the last query stands at the last key.
};

/// Chosen rows of `attention_scores`, `[batch, heads, queries, keys]` of the choice. Nothing larger
/// is made, whatever the length: a row costs one product of a query with its keys. On CUDA by a
/// kernel of its own where there is one (core/ops/torch_ops.h).
at::Tensor score_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                      double scale, const RowChoice& rows);

/// The same by torch's operations alone.
at::Tensor composed_score_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                               double scale, const RowChoice& rows);

/// Softmax over the keys in float32, returned in the dtype of the scores.
at::Tensor attention_probabilities(const at::Tensor& scores);

/// Weighted sums of the values: `[batch, queries, heads, d]` from `[batch, heads, queries, keys]`
/// and
/// `[batch, kv_heads, keys, d]`.
at::Tensor attend(const at::Tensor& probabilities, const at::Tensor& v);

/// The same result by torch's fused kernels, without the pattern.
/// @param mask boolean, or undefined for causal (`causal`) or full attention.
at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& mask, bool causal, double scale);

/// True where a query may look at a key: at or before it, and not padding.
/// `[batch, 1, queries, keys]`; the queries are the last of the positions.
/// @param attention_mask `[batch, keys]`, 1 on tokens and 0 on padding.
at::Tensor causal_mask(const at::Tensor& attention_mask, std::int64_t queries);

/// The least finite number of `dtype`: what is added to the score of a key that is hidden.
double least(at::ScalarType dtype);

/// The boolean mask as 0 and the least number of `dtype`, to be added to the scores.
at::Tensor additive_mask(const at::Tensor& allowed, at::ScalarType dtype);

}  // namespace vlscope::ops
