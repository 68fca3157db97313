#include "core/ops/torch_ops.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "core/ops/one_pass.h"
#include "core/ops/precision.h"
#include "core/ops/problems.h"
#include "core/ops/rotary.h"

namespace vlscope::ops {

// --- The operators ------------------------------------------------------------------------------

namespace {

using arguments::Optional;

at::Tensor tensor_or_none(const Optional& x) { return x.value_or(at::Tensor()); }
std::vector<std::int64_t> list(at::IntArrayRef x) { return x.vec(); }

/// Each operator as torch calls it: by the composed operations; for shapes alone (`meta`); and
/// under autograd (Graph): by the composed operations if a graph is recorded or the dtype has
/// no kernel, else by what the device has.
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
  static at::Tensor composed(
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens,
      // NOLINTNEXTLINE(performance-unnecessary-value-param): the schema's is a value.
      c10::SymInt max_seqlen, double scale, at::IntArrayRef heads, at::IntArrayRef rows,
      bool probabilities) {
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
  static at::Tensor meta(const at::Tensor& x, const at::Tensor& cos, const at::Tensor&) {
    // Where only a part is turned, the parts are put together anew.
    const bool whole = cos.sym_size(-1) == x.sym_size(-1);
    return at::empty_like(x, whole ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
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

template <class... Rest>
const at::Tensor& first(const at::Tensor& x, const Rest&...) {
  return x;
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
    const bool graph = at::GradMode::is_enabled() && (records(arguments) || ...);
    if (graph || !has_programs(first(arguments...).scalar_type())) {
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

at::Tensor fused_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                          NormForm form) {
  return handle<RmsNorm>(&RmsNorm::composed).call(x, weight, eps, form == NormForm::kZeroCentered);
}

at::Tensor fused_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return handle<Rotate>(&Rotate::composed).call(x, cos, sin);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return handle<Swiglu>(&Swiglu::composed).call(gate, up);
}

at::Tensor swiglu_over(at::Tensor gate, const at::Tensor& up) {
  if (gate.is_cuda() || records_graph(gate, up)) return swiglu(gate, up);
  return at::silu_(gate).mul_(up);
}

// --- By device -----------------------------------------------------------------------------------

at::Tensor score_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask,
                      double scale, const RowChoice& rows) {
  return q.is_cuda() ? causal_score_rows(q, k, mask, scale, rows)
                     : composed_score_rows(q, k, mask, scale, rows);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, NormForm form) {
  if (x.is_cuda()) return fused_rms_norm(x, weight, eps, form);
  if (one_pass::norms(x, weight)) return one_pass::rms_norm(x, weight, eps, form);
  return composed::rms_norm(x, weight, eps, form == NormForm::kZeroCentered);
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  if (x.is_cuda()) return fused_rotate(x, cos, sin);
  if (one_pass::rotates(x, cos, sin)) return one_pass::rotate(x, cos, sin);
  return composed_rotate(x, cos, sin);
}

}  // namespace vlscope::ops
