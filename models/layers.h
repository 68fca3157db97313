// The leaf modules that every family is made of: a weight or two and one operation.
#pragma once

#include <string>

#include "hooks/trace.h"

namespace vlscope {

/// `x` in float32, for arithmetic that half precision is too coarse for. float64 stays what it is.
at::Tensor in_float(const at::Tensor& x);

/// A tensor of this shape without room for it: every element is the first of `weight`. Has its
/// dtype and device.
at::Tensor shaped_like(const at::Tensor& weight, at::IntArrayRef shape);
/// The same, in what the forward runs in.
at::Tensor shaped_like(const LargeWeight& weight, at::IntArrayRef shape);

/// A module of one tensor in, one tensor out, and nothing nameable in between.
class Leaf : public Module {
 public:
  using Module::Module;
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;
  /// The arithmetic alone, watched by nobody.
  virtual at::Tensor apply(const at::Tensor& x) const = 0;
  /// Where its weights are; it must have some.
  at::Device device() const { return parameters().front().tensor->device(); }
};

/// y = x W^T + b, with W `[out, in]`.
class Linear : public Leaf {
 public:
  Linear(Module* parent, std::string name, std::int64_t in, std::int64_t out, bool with_bias);
  at::Tensor apply(const at::Tensor& x) const override;
  at::Tensor output_like(const at::Tensor& x) const override;

 private:
  LargeWeight weight_;
  at::Tensor bias_;
};

/// Rows of a table `[rows, width]`.
class Embedding : public Leaf {
 public:
  Embedding(Module* parent, std::string name, std::int64_t rows, std::int64_t width);
  at::Tensor apply(const at::Tensor& indices) const override;
  at::Tensor output_like(const at::Tensor& indices) const override;

 private:
  LargeWeight weight_;
};

/// y = weight * (x / sqrt(mean(x^2) + eps)): statistics in float32, cast back before the weight.
/// arXiv:1910.07467.
class RmsNorm : public Leaf {
 public:
  RmsNorm(Module* parent, std::string name, std::int64_t width, double eps);
  at::Tensor apply(const at::Tensor& x) const override;

 private:
  double eps_;
  at::Tensor weight_;
};

/// y = (1 + weight) * (x / sqrt(mean(x^2) + eps)), in float32 throughout.
class ZeroCenteredRmsNorm : public Leaf {
 public:
  ZeroCenteredRmsNorm(Module* parent, std::string name, std::int64_t width, double eps);
  at::Tensor apply(const at::Tensor& x) const override;

 private:
  double eps_;
  at::Tensor weight_;
};

/// y = weight * (x - mean) / sqrt(var + eps) + bias. arXiv:1607.06450.
class LayerNorm : public Leaf {
 public:
  LayerNorm(Module* parent, std::string name, std::int64_t width, double eps);
  at::Tensor apply(const at::Tensor& x) const override;

 private:
  double eps_;
  at::Tensor weight_, bias_;
};

/// An elementwise activation by the name that config.json gives it: "silu", "gelu" (exact, by erf),
/// "gelu_pytorch_tanh" or "quick_gelu" (x * sigmoid(1.702 x)).
class Activation : public Leaf {
 public:
  /// @throws ConfigError if the name is another.
  Activation(Module* parent, std::string name, const std::string& function);
  at::Tensor apply(const at::Tensor& x) const override { return function_(x); }

 private:
  at::Tensor (*function_)(const at::Tensor&);
};

}  // namespace vlscope
