#include "core/ops/shape_rules.h"

#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/MetaFunctions.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/arange_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/ones_ops.h>
#include <ATen/ops/scalar_tensor_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/softplus_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/ops/zeros_ops.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>

namespace vlscope::ops {
namespace {

// torch leaves this key to modes: above all that has kernels, and passed by unless included.
constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kMode);

template <class T>
bool asks_for_meta(const T&) {
  return false;
}
bool asks_for_meta(const std::optional<at::Device>& device) { return device && device->is_meta(); }

/// The kernel of `Op` in the mode: `rule` for shapes alone, else what lies below.
template <class Op, auto rule, class Schema = typename Op::schema>
struct Answer;
template <class Op, auto rule, class Result, class... Arguments>
struct Answer<Op, rule, Result(Arguments...)> {
  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    const bool shapes_alone =
        keys.has_backend(c10::BackendComponent::MetaBit) || (asks_for_meta(arguments) || ...);
    if (shapes_alone) return rule(std::forward<Arguments>(arguments)...);
    return Op::redispatch(keys & kBelow, std::forward<Arguments>(arguments)...);
  }
};

template <class Op, typename Op::ptr_schema rule>
void answer(torch::Library& library) {
  std::string name = Op::name;
  if (*Op::overload_name != '\0') name = name + '.' + Op::overload_name;
  library.impl(name.c_str(), &Answer<Op, rule>::run);
}

// --- Rules that torch has in Python alone -------------------------------------------------------

using Optional = std::optional<at::Tensor>;

// NOLINTNEXTLINE(performance-unnecessary-value-param): the signature is torch's.
at::Tensor look_up(const at::Tensor& table, const at::Tensor& indices, c10::SymInt, bool, bool) {
  auto shape = indices.sizes().vec();
  shape.push_back(table.size(1));
  return at::meta::empty(shape, table.options());
}

at::Tensor select(const at::Tensor& x, std::int64_t axis, const at::Tensor& indices) {
  auto shape = x.sizes().vec();
  shape.at(axis < 0 ? axis + x.dim() : axis) = indices.numel();
  return at::meta::empty(shape, x.options());
}

at::Tensor layer_norm(const at::Tensor& x, c10::SymIntArrayRef, const Optional&, const Optional&,
                      double, bool) {
  return at::meta::empty(x.sizes(), x.options());
}

at::Tensor attend(const at::Tensor& q, const at::Tensor&, const at::Tensor& v, const Optional&,
                  double, bool, std::optional<double>, bool) {
  auto shape = q.sizes().vec();
  shape.back() = v.size(-1);
  return at::meta::empty(shape, q.options());
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& x, const at::Tensor& y) {
  return at::meta::mul(condition, at::meta::mul(x, y));
}

at::Tensor arange(const at::Scalar& end, std::optional<at::ScalarType> dtype,
                  std::optional<at::Layout> layout, std::optional<at::Device> device,
                  std::optional<bool> pinned) {
  if (!dtype && end.isIntegral(/*includeBool=*/false)) dtype = at::kLong;
  return at::meta::empty({end.toLong()}, dtype, layout, device, pinned, std::nullopt);
}

}  // namespace

ShapeRules::ShapeRules() : mode_(kMode) {}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  namespace op = at::_ops;
  namespace meta = at::meta;
  namespace composed = at::compositeexplicitautograd;

  answer<op::add_Tensor, meta::add>(library);
  answer<op::bitwise_and_Tensor, meta::bitwise_and>(library);
  answer<op::cos, meta::cos>(library);
  answer<op::div_Tensor, meta::div>(library);
  answer<op::div_Tensor_mode, meta::div>(library);
  answer<op::exp, meta::exp>(library);
  answer<op::gelu, meta::gelu>(library);
  answer<op::le_Tensor, meta::le>(library);
  answer<op::mul_Tensor, meta::mul>(library);
  answer<op::neg, meta::neg>(library);
  answer<op::pow_Tensor_Scalar, meta::pow>(library);
  answer<op::rsqrt, meta::rsqrt>(library);
  answer<op::sigmoid, meta::sigmoid>(library);
  answer<op::silu, meta::silu>(library);
  answer<op::sin, meta::sin>(library);
  answer<op::softplus, meta::softplus>(library);
  answer<op::where_self, where>(library);

  answer<op::_softmax, meta::_softmax>(library);
  answer<op::layer_norm, layer_norm>(library);
  answer<op::mean_dim, meta::mean>(library);
  answer<op::sort_stable, meta::sort>(library);
  answer<op::sum_dim_IntList, meta::sum>(library);
  answer<op::topk, meta::topk_symint>(library);

  answer<op::addmm, meta::addmm>(library);
  answer<op::bmm, meta::bmm>(library);
  answer<op::mm, meta::mm>(library);
  answer<op::scaled_dot_product_attention, attend>(library);

  answer<op::cat, meta::cat>(library);
  answer<op::embedding, look_up>(library);
  answer<op::index_Tensor, meta::index>(library);
  answer<op::index_copy, meta::index_copy>(library);
  answer<op::index_select, select>(library);

  answer<op::arange, arange>(library);
  answer<op::empty_like, composed::empty_like>(library);
  answer<op::ones, composed::ones_symint>(library);
  answer<op::scalar_tensor, composed::scalar_tensor>(library);
  answer<op::zeros, composed::zeros_symint>(library);
  answer<op::fill__Scalar, meta::fill_>(library);
  answer<op::zero_, meta::zero_>(library);

  // Torch's own forms by the operations above.
  answer<op::_unsafe_view, composed::_unsafe_view_symint>(library);
  answer<op::add_Scalar, composed::add>(library);
  answer<op::div_Scalar_mode, composed::div>(library);
  answer<op::mul_Scalar, composed::mul>(library);
  answer<op::sort, composed::sort>(library);
}

}  // namespace vlscope::ops
