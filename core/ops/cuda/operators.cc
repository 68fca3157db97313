// The operators of core/ops/torch_ops.h on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <type_traits>

#include "core/ops/cuda/launch.h"
#include "core/ops/problems.h"
#include "core/ops/torch_ops.h"

namespace vlscope::ops::on_cuda {
namespace {

using arguments::Optional;

/// Shared memory that a block may have on the current device.
std::size_t shared_memory() {
  int device = 0, bytes = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<std::size_t>(bytes);
}

/// `out`, with the strides that torch's own operations would give a result of `x`.
at::Tensor laid_out_like(const at::Tensor& x, const at::Tensor& out) {
  return x.is_contiguous() ? out : at::empty_like(x).copy_(out);
}

/// Puts a small list of the host on the device, without waiting for it.
at::Tensor on_device(const at::Tensor& host, const at::Tensor& like, at::ScalarType dtype) {
  return host.to(dtype).contiguous().to(like.device(), dtype, /*non_blocking=*/true);
}

at::Tensor on_device(const std::vector<std::int64_t>& list, const at::Tensor& like) {
  return on_device(at::tensor(list), like, at::kLong);
}

template <class Problem>
void launch(at::ScalarType dtype, const Problem& problem) {
  programs::launch(element_of(dtype), problem, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void check_kernel(const at::Tensor& x) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_programs(x.scalar_type()),
      fmt::format("there is no kernel for {}: give float32, bfloat16 or float16, or use the "
                  "composed operations of torch.",
                  at::toString(x.scalar_type())));
}

void run_attention(const AttentionOperands& operands) {
  if (operands.q.numel() == 0) return;
  check_kernel(operands.q);
  programs::AttentionLaunch attention{problem_of(operands), {}, 0};
  const auto fit = [&](auto type) {
    using T = decltype(type);
    const auto& [problem, tile, bytes] = attention;
    attention.tile = programs::tile_within<T>(shared_memory(), problem.head_dim, problem.queries);
    attention.bytes = programs::AttentionMemory<T>::bytes(tile);
  };
  operands.q.scalar_type() == at::kFloat ? fit(float{}) : fit(at::Half{});
  TORCH_CHECK_NOT_IMPLEMENTED(
      attention.tile.queries > 0,
      fmt::format("heads of {} elements do not fit the shared memory of this device.",
                  operands.q.size(-1)));
  launch(operands.q.scalar_type(), attention);
}

/// `[rows, heads, head_dim]` -> `[1, heads, rows, head_dim]`.
at::Tensor heads_first(const at::Tensor& x) {
  return with_adjacent_elements(x).transpose(0, 1).unsqueeze(0);
}

at::Tensor segmented_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& cu_seqlens, double scale) {
  arguments::check_segmented(q, k, cu_seqlens);
  arguments::check_segmented(q, v, cu_seqlens);
  const c10::cuda::CUDAGuard guard(q.device());
  at::Tensor out = at::empty_like(q, at::MemoryFormat::Contiguous);
  AttentionOperands in;
  in.q = heads_first(q);
  in.k = heads_first(k);
  in.v = heads_first(v);
  in.out = heads_first(out);
  in.bounds = on_device(cu_seqlens, q, at::kInt);
  in.scale = scale;
  run_attention(in);
  return out;
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const Optional& mask, double scale, std::int64_t window) {
  arguments::check(arguments::Causal{q, k, v, mask.value_or(at::Tensor()), scale, window});
  const c10::cuda::CUDAGuard guard(q.device());
  at::Tensor out = at::empty_like(q.transpose(1, 2), at::MemoryFormat::Contiguous);
  AttentionOperands in;
  in.q = with_adjacent_elements(q);
  in.k = with_adjacent_elements(k);
  in.v = with_adjacent_elements(v);
  in.out = out.transpose(1, 2);
  if (mask && mask->defined()) in.mask = laid_on_scores(*mask);
  in.scale = scale;
  in.window = window;
  run_attention(in);
  return out;
}

at::Tensor run_rows(AttentionOperands attention, const RowChoice& rows, std::int64_t width,
                    bool probabilities) {
  check_kernel(attention.q);
  const at::Tensor& q = attention.q;
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  PatternOperands in;
  in.out = at::empty({q.size(0), count(rows.heads), count(rows.queries), width}, q.options());
  in.heads = on_device(rows.heads, q);
  in.queries = on_device(rows.queries, q);
  in.softmax = probabilities;
  in.attention = std::move(attention);
  if (in.out.numel() > 0) launch(in.out.scalar_type(), problem_of(in));
  return in.out;
}

// The dispatcher hands a SymInt over by value.
at::Tensor segmented_attention_rows(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens,
    c10::SymInt max_seqlen,  // NOLINT(performance-unnecessary-value-param)
    double scale, at::IntArrayRef heads, at::IntArrayRef rows, bool probabilities) {
  const std::int64_t width = max_seqlen.expect_int();
  const RowChoice chosen{heads.vec(), rows.vec()};
  arguments::check(arguments::SegmentedRows{q, k, cu_seqlens, width, scale, chosen, probabilities});
  const c10::cuda::CUDAGuard guard(q.device());
  AttentionOperands in;
  in.q = heads_first(q);
  in.k = heads_first(k);
  in.bounds = on_device(cu_seqlens, q, at::kInt);
  in.scale = scale;
  return run_rows(std::move(in), chosen, width, probabilities).squeeze(0);
}

at::Tensor causal_attention_rows(const at::Tensor& q, const at::Tensor& k, const Optional& mask,
                                 double scale, std::int64_t window, at::IntArrayRef heads,
                                 at::IntArrayRef queries, bool probabilities) {
  const RowChoice chosen{heads.vec(), queries.vec()};
  arguments::check(arguments::CausalRows{q, k, mask.value_or(at::Tensor()), scale, window, chosen,
                                         probabilities});
  const c10::cuda::CUDAGuard guard(q.device());
  AttentionOperands in;
  in.q = with_adjacent_elements(q);
  in.k = with_adjacent_elements(k);
  if (mask && mask->defined()) in.mask = laid_on_scores(*mask);
  in.scale = scale;
  in.window = window;
  return run_rows(std::move(in), chosen, k.size(2), probabilities);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool zero_centered) {
  arguments::check_norm(x, weight);
  check_kernel(x);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor rows = x.contiguous();
  at::Tensor out = at::empty_like(rows);
  programs::NormProblem problem = norm_problem(rows, weight.contiguous(), out);
  problem.eps = static_cast<float>(eps);
  problem.zero_centered = zero_centered;
  if (problem.rows > 0) launch(x.scalar_type(), problem);
  return laid_out_like(x, out);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  arguments::check_rotary(x, cos, sin);
  check_kernel(x);
  TORCH_CHECK_NOT_IMPLEMENTED(
      cos.scalar_type() == at::kFloat || cos.scalar_type() == x.scalar_type(),
      "cos and sin must be float32 or of the dtype of x.");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor rows = with_adjacent_elements(x);
  const auto format = cos.size(-1) == x.size(-1) ? at::MemoryFormat::Preserve  // As composed.
                                                 : at::MemoryFormat::Contiguous;
  RotaryOperands in{rows, cos, sin, at::empty_like(rows, format)};
  if (rows.numel() > 0) launch(x.scalar_type(), problem_of(in));
  return in.out;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  arguments::check_swiglu(gate, up);
  check_kernel(gate);
  const c10::cuda::CUDAGuard guard(gate.device());
  const at::Tensor whole_gate = gate.contiguous(), whole_up = up.contiguous();
  at::Tensor out = at::empty_like(whole_gate);
  const programs::SwigluProblem problem{whole_gate.const_data_ptr(), whole_up.const_data_ptr(),
                                        out.data_ptr(), out.numel()};
  if (problem.elements > 0) launch(gate.scalar_type(), problem);
  return laid_out_like(gate, out);
}

}  // namespace

TORCH_LIBRARY_IMPL(vlscope, CUDA, library) {
  library.impl("segmented_attention", &on_cuda::segmented_attention);
  library.impl("segmented_attention_rows", &on_cuda::segmented_attention_rows);
  library.impl("causal_attention", &on_cuda::causal_attention);
  library.impl("causal_attention_rows", &on_cuda::causal_attention_rows);
  library.impl("rms_norm", &on_cuda::rms_norm);
  library.impl("rotate", &on_cuda::rotate);
  library.impl("swiglu", &on_cuda::swiglu);
}

}  // namespace vlscope::ops::on_cuda
