// The operations that have CUDA kernels of their own. They are torch operators (`torch.ops.vlscope`
// in Python), and these functions call them through torch's dispatcher: on CUDA the kernels of
// core/ops/cuda where that library is loaded; elsewhere, and where a graph is recorded, the
// composed operations of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/ops/attention.h"
#include "core/ops/norm.h"

namespace vlscope::ops {

/// Attention in which each segment of rows sees only itself: softmax(q k^T * scale) v.
/// @param q,k,v `[rows, heads, head_dim]`
/// @param cu_seqlens `[segments + 1]`, integers from 0 to `rows`: where segments begin and end
/// @return like q
at::Tensor segmented_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& cu_seqlens, double scale);

/// See ops::score_rows, without a graph.
at::Tensor causal_score_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                             double scale, const RowChoice& rows);

/// See ops::rms_norm.
at::Tensor fused_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormForm form);

/// See ops::rotate; in the arithmetic of cos and sin, rounded to the dtype of x.
at::Tensor fused_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// silu(gate) * up.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
/// The same in the place of `gate` where that saves room, for a gate that nobody else holds.
at::Tensor swiglu_over(at::Tensor gate, const at::Tensor& up);

/// The arguments of the operators, as their schemas in torch_ops.cc have them.
namespace arguments {

using Optional = std::optional<at::Tensor>;

struct SegmentedRows {
  at::Tensor q, k, cu_seqlens;
  std::int64_t max_seqlen;
  double scale;
  RowChoice rows;
  bool probabilities;
};
struct Causal {
  at::Tensor q, k, v, mask;  ///< The mask may be undefined.
  double scale;
  std::int64_t window;
};
struct CausalRows {
  at::Tensor q, k, mask;
  double scale;
  std::int64_t window;
  RowChoice rows;
  bool probabilities;
};

/// What every implementation refuses: shapes that do not belong together, segments that do not
/// cover the rows, rows and heads that there are not.
/// @throws c10::ValueError
void check_segmented(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens);
void check(const SegmentedRows& arguments);
void check(const Causal& arguments);
void check(const CausalRows& arguments);
void check_norm(const at::Tensor& x, const at::Tensor& weight);
void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
void check_swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace arguments

/// The same by torch's operations alone.
namespace composed {

at::Tensor segmented_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& cu_seqlens, double scale);
at::Tensor segmented_attention_rows(const arguments::SegmentedRows& in);
at::Tensor causal_attention(const arguments::Causal& in);
at::Tensor causal_attention_rows(const arguments::CausalRows& in);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered);
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace composed

}  // namespace vlscope::ops
