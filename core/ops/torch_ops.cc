#include "core/ops/torch_ops.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>

#include "core/text.h"

namespace vlscope::ops {

// --- What is refused ----------------------------------------------------------------------------

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

// --- The operators ------------------------------------------------------------------------------

namespace {

using arguments::Optional;

at::Tensor tensor_or_none(const Optional& x) { return x.value_or(at::Tensor()); }
std::vector<std::int64_t> list(at::IntArrayRef x) { return x.vec(); }

/// Each operator as torch calls it: by the composed operations; for shapes alone (`meta`); and
/// where a graph may be recorded (`graph`): by the composed operations if it is, else by what
/// the device has.
struct SegmentedAttention {
  static constexpr const char* kName = "vlscope::segmented_attention";
  static constexpr const char* kSchema =
      "segmented_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale) -> Tensor";
  static at::Tensor composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& cu_seqlens, double scale) {
    return composed::segmented_attention(q, k, v, cu_seqlens, scale);
  }
  static at::Tensor meta(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, double) {
    return at::empty_like(q, at::MemoryFormat::Contiguous);
  }
};

struct SegmentedAttentionRows {
  static constexpr const char* kName = "vlscope::segmented_attention_rows";
  static constexpr const char* kSchema =
      "segmented_attention_rows(Tensor q, Tensor k, Tensor cu_seqlens, SymInt max_seqlen, float "
      "scale, *, int[] heads, int[] rows, bool probabilities=True) -> Tensor";
  static at::Tensor composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens,
                             c10::SymInt max_seqlen, double scale, at::IntArrayRef heads,
                             at::IntArrayRef rows, bool probabilities) {
    return composed::segmented_attention_rows({q,
                                               k,
                                               cu_seqlens,
                                               max_seqlen.guard_int(__FILE__, __LINE__),
                                               scale,
                                               {list(heads), list(rows)},
                                               probabilities});
  }
  static at::Tensor meta(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                         c10::SymInt max_seqlen, double, at::IntArrayRef heads,
                         at::IntArrayRef rows, bool) {
    return at::empty_symint({static_cast<std::int64_t>(heads.size()),
                             static_cast<std::int64_t>(rows.size()), std::move(max_seqlen)},
                            q.options());
  }
};

struct CausalAttention {
  static constexpr const char* kName = "vlscope::causal_attention";
  static constexpr const char* kSchema =
      "causal_attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, float scale, int "
      "window=0) -> Tensor";
  static at::Tensor composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const Optional& mask, double scale, std::int64_t window) {
    return composed::causal_attention({q, k, v, tensor_or_none(mask), scale, window});
  }
  static at::Tensor meta(const at::Tensor& q, const at::Tensor&, const at::Tensor&, const Optional&,
                         double, std::int64_t) {
    return at::empty_like(q.transpose(1, 2), at::MemoryFormat::Contiguous);
  }
};

struct CausalAttentionRows {
  static constexpr const char* kName = "vlscope::causal_attention_rows";
  static constexpr const char* kSchema =
      "causal_attention_rows(Tensor q, Tensor k, Tensor? mask=None, *, float scale, int window=0, "
      "int[] heads, int[] queries, bool probabilities=True) -> Tensor";
  static at::Tensor composed(const at::Tensor& q, const at::Tensor& k, const Optional& mask,
                             double scale, std::int64_t window, at::IntArrayRef heads,
                             at::IntArrayRef queries, bool probabilities) {
    return composed::causal_attention_rows(
        {q, k, tensor_or_none(mask), scale, window, {list(heads), list(queries)}, probabilities});
  }
  static at::Tensor meta(const at::Tensor& q, const at::Tensor& k, const Optional&, double,
                         std::int64_t, at::IntArrayRef heads, at::IntArrayRef queries, bool) {
    return at::empty_symint({q.sym_size(0), static_cast<std::int64_t>(heads.size()),
                             static_cast<std::int64_t>(queries.size()), k.sym_size(2)},
                            q.options());
  }
};

struct RmsNorm {
  static constexpr const char* kName = "vlscope::rms_norm";
  static constexpr const char* kSchema =
      "rms_norm(Tensor x, Tensor weight, float eps, bool zero_centered=False) -> Tensor";
  static at::Tensor composed(const at::Tensor& x, const at::Tensor& weight, double eps,
                             bool zero_centered) {
    arguments::check_norm(x, weight);
    return composed::rms_norm(x, weight, eps, zero_centered);
  }
  static at::Tensor meta(const at::Tensor& x, const at::Tensor&, double, bool) {
    return at::empty_like(x);
  }
};

struct Rotate {
  static constexpr const char* kName = "vlscope::rotate";
  static constexpr const char* kSchema = "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor";
  static at::Tensor composed(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    arguments::check_rotary(x, cos, sin);
    return composed::rotate(x, cos, sin);
  }
  static at::Tensor meta(const at::Tensor& x, const at::Tensor&, const at::Tensor&) {
    return at::empty_like(x);
  }
};

struct Swiglu {
  static constexpr const char* kName = "vlscope::swiglu";
  static constexpr const char* kSchema = "swiglu(Tensor gate, Tensor up) -> Tensor";
  static at::Tensor composed(const at::Tensor& gate, const at::Tensor& up) {
    arguments::check_swiglu(gate, up);
    return composed::swiglu(gate, up);
  }
  static at::Tensor meta(const at::Tensor& gate, const at::Tensor&) { return at::empty_like(gate); }
};

bool records(const at::Tensor& x) { return x.requires_grad(); }
bool records(const Optional& x) { return x && x->defined() && x->requires_grad(); }
template <class T>
bool records(const T&) {
  return false;
}

template <class Op, class Signature>
auto handle(Signature) {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow(Op::kName, "")
                                .template typed<std::remove_pointer_t<Signature>>();
  return found;
}

/// The kernel for torch's Autograd key, of the signature of `Op::composed`.
template <class Op, class Signature>
struct Graph;
template <class Op, class... Arguments>
struct Graph<Op, at::Tensor (*)(Arguments...)> {
  static at::Tensor run(Arguments... arguments) {
    if (at::GradMode::is_enabled() && (records(arguments) || ...)) {
      return Op::composed(arguments...);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    return handle<Op>(&Op::composed).call(arguments...);
  }
};

template <class... Ops>
struct All {
  static void define(torch::Library& library) { (library.def(Ops::kSchema), ...); }
  static void composed(torch::Library& library) {
    (library.impl(name<Ops>(), &Ops::composed), ...);
  }
  static void meta(torch::Library& library) { (library.impl(name<Ops>(), &Ops::meta), ...); }
  static void graph(torch::Library& library) {
    (library.impl(name<Ops>(), &Graph<Ops, decltype(&Ops::composed)>::run), ...);
  }

 private:
  /// Without the namespace.
  template <class Op>
  static const char* name() {
    return Op::kName + sizeof("vlscope::") - 1;
  }
};

using Operators = All<SegmentedAttention, SegmentedAttentionRows, CausalAttention,
                      CausalAttentionRows, RmsNorm, Rotate, Swiglu>;

}  // namespace

TORCH_LIBRARY(vlscope, library) { Operators::define(library); }
TORCH_LIBRARY_IMPL(vlscope, CompositeExplicitAutograd, library) { Operators::composed(library); }
TORCH_LIBRARY_IMPL(vlscope, Meta, library) { Operators::meta(library); }
TORCH_LIBRARY_IMPL(vlscope, Autograd, library) { Operators::graph(library); }

// --- Calls from C++ -----------------------------------------------------------------------------

at::Tensor segmented_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& cu_seqlens, double scale) {
  return handle<SegmentedAttention>(&SegmentedAttention::composed).call(q, k, v, cu_seqlens, scale);
}

at::Tensor causal_score_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                             double scale, const RowChoice& rows) {
  const Optional given = mask.defined() ? Optional(mask) : std::nullopt;
  return handle<CausalAttentionRows>(&CausalAttentionRows::composed)
      .call(q, k, given, scale, 0, rows.heads, rows.queries, /*probabilities=*/false);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormForm form) {
  return handle<RmsNorm>(&RmsNorm::composed).call(x, weight, eps, form == NormForm::kZeroCentered);
}

at::Tensor fused_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return handle<Rotate>(&Rotate::composed).call(x, cos, sin);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return handle<Swiglu>(&Swiglu::composed).call(gate, up);
}

}  // namespace vlscope::ops
