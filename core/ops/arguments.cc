#include <fmt/format.h>

#include <algorithm>

#include "core/ops/torch_ops.h"
#include "core/text.h"

namespace vlscope::ops {

namespace arguments {
namespace {

#define VLSCOPE_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, fmt::format(__VA_ARGS__))

void check_axes(const at::Tensor& x, const char* name, std::int64_t axes) {
  VLSCOPE_CHECK(x.dim() == axes, "{} has shape {}, with {} axes; {} are expected.", name,
                shape_text(x), x.dim(), axes);
}

void check_like(const at::Tensor& x, const char* name, const at::Tensor& q) {
  VLSCOPE_CHECK(x.scalar_type() == q.scalar_type() && x.device() == q.device(),
                "{} is {}, q is {}: give both the same dtype and device.", name, tensor_text(x),
                tensor_text(q));
}

void check_indices(const std::vector<std::int64_t>& indices, const char* name, std::int64_t count) {
  for (const std::int64_t index : indices) {
    VLSCOPE_CHECK(index >= 0 && index < count, "{} holds {}; there are {}, from 0 to {}.", name,
                  index, count, count - 1);
  }
}

void check_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                  std::int64_t window) {
  check_axes(q, "q", 4);
  check_axes(k, "k", 4);
  check_like(k, "k", q);
  VLSCOPE_CHECK(q.size(0) == k.size(0) && q.size(3) == k.size(3),
                "q is {}, k is {}: batch and head_dim must agree.", shape_text(q), shape_text(k));
  VLSCOPE_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                "q has {} heads and k has {}: the first must be a multiple of the second.",
                q.size(1), k.size(1));
  VLSCOPE_CHECK(q.size(2) <= k.size(2),
                "there are {} queries and {} keys: the queries are the last positions of the keys.",
                q.size(2), k.size(2));
  VLSCOPE_CHECK(window >= 0, "window is {}; give 0 (none) or more.", window);
  if (!mask.defined()) return;
  VLSCOPE_CHECK(window == 0, "a mask and a window of {} were given: the mask takes its place.",
                window);
  check_axes(mask, "mask", 4);
  const std::int64_t whole[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  for (int axis = 0; axis < 4; ++axis) {
    VLSCOPE_CHECK(mask.size(axis) == whole[axis] || mask.size(axis) == 1,
                  "mask is {}; it must broadcast to [{}, {}, {}, {}].", shape_text(mask), whole[0],
                  whole[1], whole[2], whole[3]);
  }
  VLSCOPE_CHECK(
      mask.device() == q.device() && (mask.scalar_type() == at::kBool || mask.is_floating_point()),
      "mask is {}, q is on {}: give booleans or floating-point numbers there.", tensor_text(mask),
      q.device().str());
}

}  // namespace

void check_segmented(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens) {
  check_axes(q, "q", 3);
  check_like(k, "k and v", q);
  VLSCOPE_CHECK(q.sizes() == k.sizes(), "q is {}, k or v is {}: they must be alike.", shape_text(q),
                shape_text(k));
  check_axes(cu_seqlens, "cu_seqlens", 1);
  VLSCOPE_CHECK(
      at::isIntegralType(cu_seqlens.scalar_type(), /*includeBool=*/false) && cu_seqlens.numel() > 1,
      "cu_seqlens is {}; give two integers or more.", tensor_text(cu_seqlens));
  if (!cu_seqlens.is_cpu()) return;  // Looking at the numbers would wait for the device.
  const at::Tensor bounds = cu_seqlens.to(at::kLong).contiguous();
  const auto* bound = bounds.const_data_ptr<std::int64_t>();
  const std::int64_t last = bounds.numel() - 1;
  VLSCOPE_CHECK(bound[0] == 0 && bound[last] == q.size(0),
                "cu_seqlens goes from {} to {}; q has rows 0 to {}.", bound[0], bound[last],
                q.size(0));
  VLSCOPE_CHECK(std::is_sorted(bound, bound + last + 1), "cu_seqlens does not ascend.");
}

void check(const SegmentedRows& in) {
  check_segmented(in.q, in.k, in.cu_seqlens);
  check_indices(in.rows.heads, "heads", in.q.size(1));
  check_indices(in.rows.queries, "rows", in.q.size(0));
  if (!in.cu_seqlens.is_cpu()) return;
  const std::int64_t longest = in.cu_seqlens.diff().max().item<std::int64_t>();
  VLSCOPE_CHECK(in.max_seqlen >= longest, "max_seqlen is {}, and a segment has {} rows.",
                in.max_seqlen, longest);
}

void check(const Causal& in) {
  check_causal(in.q, in.k, in.mask, in.window);
  check_like(in.v, "v", in.q);
  VLSCOPE_CHECK(in.v.sizes() == in.k.sizes(), "k is {}, v is {}: they must be alike.",
                shape_text(in.k), shape_text(in.v));
}

void check(const CausalRows& in) {
  check_causal(in.q, in.k, in.mask, in.window);
  check_indices(in.rows.heads, "heads", in.q.size(1));
  check_indices(in.rows.queries, "queries", in.q.size(2));
}

void check_norm(const at::Tensor& x, const at::Tensor& weight) {
  VLSCOPE_CHECK(x.dim() > 0 && weight.dim() == 1 && x.size(-1) == weight.size(0) &&
                    x.scalar_type() == weight.scalar_type() && x.device() == weight.device(),
                "x is {}, weight is {}: give [..., width] and [width] of one dtype and device.",
                tensor_text(x), tensor_text(weight));
}

void check_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  VLSCOPE_CHECK(x.dim() >= 2 && x.dim() <= 4 && cos.dim() == x.dim() && cos.sizes() == sin.sizes(),
                "x is {}, cos is {}, sin is {}: give two to four axes, cos and sin alike.",
                shape_text(x), shape_text(cos), shape_text(sin));
  VLSCOPE_CHECK(cos.size(-1) <= x.size(-1) && cos.size(-1) % 2 == 0,
                "x has {} elements a row and cos {}: give an even number up to that.", x.size(-1),
                cos.size(-1));
  for (std::int64_t axis = 0; axis + 1 < x.dim(); ++axis) {
    VLSCOPE_CHECK(cos.size(axis) == x.size(axis) || cos.size(axis) == 1,
                  "cos is {}; it must broadcast over the rows of x, {}.", shape_text(cos),
                  shape_text(x));
  }
  VLSCOPE_CHECK(cos.scalar_type() == sin.scalar_type() && cos.device() == x.device() &&
                    sin.device() == x.device(),
                "x is {}, cos is {}, sin is {}: give one device, cos and sin of one dtype.",
                tensor_text(x), tensor_text(cos), tensor_text(sin));
}

void check_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  VLSCOPE_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type() &&
                    gate.device() == up.device(),
                "gate is {}, up is {}: they must be alike.", tensor_text(gate), tensor_text(up));
}

}  // namespace arguments

}  // namespace vlscope::ops
