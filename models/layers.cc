#include "models/layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <fmt/format.h>

#include <utility>

#include "core/errors.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/precision.h"

namespace vlscope {

at::Tensor in_float(const at::Tensor& x) { return x.to(ops::precise(x.scalar_type())); }

at::Tensor shaped_like(const at::Tensor& weight, at::IntArrayRef shape) {
  return weight.flatten().narrow(0, 0, 1).expand(shape);
}

at::Tensor shaped_like(const LargeWeight& weight, at::IntArrayRef shape) {
  if (!weight.stream) return shaped_like(weight.stored, shape);
  return at::empty({1}, weight.dtype()).expand(shape);
}

Flow<at::Tensor> Leaf::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) x = apply(x);
  co_await trace.at(output, x);
  co_return x;
}

Linear::Linear(Module* parent, std::string name, std::int64_t in, std::int64_t out, bool with_bias)
    : Leaf(parent, std::move(name), kinds::linear) {
  declare("weight", {out, in}, weight_);
  if (with_bias) declare("bias", {out}, bias_);
}

at::Tensor Linear::apply(const at::Tensor& x) const {
  return ops::linear(x, weight_.matrix(x), bias_);
}

at::Tensor Linear::output_like(const at::Tensor& x) const {
  auto shape = x.sizes().vec();
  shape.back() = weight_.stored.size(0);
  return shaped_like(weight_, shape);
}

Embedding::Embedding(Module* parent, std::string name, std::int64_t rows, std::int64_t width)
    : Leaf(parent, std::move(name), kinds::embedding) {
  declare("weight", {rows, width}, weight_);
}

at::Tensor Embedding::apply(const at::Tensor& indices) const { return weight_.rows(indices); }

at::Tensor Embedding::output_like(const at::Tensor& indices) const {
  auto shape = indices.sizes().vec();
  shape.push_back(weight_.stored.size(1));
  return shaped_like(weight_, shape);
}

RmsNorm::RmsNorm(Module* parent, std::string name, std::int64_t width, double eps)
    : Leaf(parent, std::move(name), kinds::rms_norm), eps_(eps) {
  declare("weight", {width}, weight_);
}

at::Tensor RmsNorm::apply(const at::Tensor& x) const {
  return ops::rms_norm(x, weight_, eps_, ops::NormForm::kPlain);
}

ZeroCenteredRmsNorm::ZeroCenteredRmsNorm(Module* parent, std::string name, std::int64_t width,
                                         double eps)
    : Leaf(parent, std::move(name), kinds::zero_centered_rms_norm), eps_(eps) {
  declare("weight", {width}, weight_);
}

at::Tensor ZeroCenteredRmsNorm::apply(const at::Tensor& x) const {
  return ops::rms_norm(x, weight_, eps_, ops::NormForm::kZeroCentered);
}

LayerNorm::LayerNorm(Module* parent, std::string name, std::int64_t width, double eps)
    : Leaf(parent, std::move(name), kinds::layer_norm), eps_(eps) {
  declare("weight", {width}, weight_);
  declare("bias", {width}, bias_);
}

at::Tensor LayerNorm::apply(const at::Tensor& x) const {
  return at::layer_norm(x, weight_.sizes(), weight_, bias_, eps_);
}

Activation::Activation(Module* parent, std::string name, const std::string& function)
    : Leaf(parent, std::move(name), kinds::activation) {
  if (function == "silu") {
    function_ = [](const at::Tensor& x) { return at::silu(x); };
  } else if (function == "gelu") {
    function_ = [](const at::Tensor& x) { return at::gelu(x); };
  } else if (function == "gelu_pytorch_tanh") {
    function_ = [](const at::Tensor& x) { return at::gelu(x, "tanh"); };
  } else if (function == "quick_gelu") {
    function_ = [](const at::Tensor& x) { return x * at::sigmoid(1.702 * x); };
  } else {
    throw ConfigError(
        fmt::format("hidden_act is \"{}\"; known are \"silu\", \"gelu\", \"gelu_pytorch_tanh\" and "
                    "\"quick_gelu\".",
                    function));
  }
}

}  // namespace vlscope
