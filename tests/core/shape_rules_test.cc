// Under the rules, shapes alone give what numbers would have, and numbers give what they always do.
#include "core/ops/shape_rules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/ops/attention.h"

namespace vlscope::ops {
namespace {

using Operation = at::Tensor (*)(const at::Tensor& x);  // `[2, 4, 6, 8]`

at::Tensor indices_beside(const at::Tensor& x) {
  return at::arange(2, at::kLong).view({2, 1}).expand({2, 3}).to(x.device());
}

const std::map<std::string, Operation>& operations() {
  static const std::map<std::string, Operation> operations = {
      {"arange", [](const at::Tensor& x) { return at::arange(x.size(0), x.options()); }},
      {"arange_of_integers", [](const at::Tensor& x) { return at::arange(3, x.device()); }},
      {"attention",
       [](const at::Tensor& x) {
         return at::scaled_dot_product_attention(x, x, x.narrow(3, 0, 5));
       }},
      {"causal_mask",
       [](const at::Tensor& x) {
         return causal_mask(at::ones({2, 5}, x.options().dtype(at::kLong)), 3);
       }},
      {"cat", [](const at::Tensor& x) { return at::cat({x, x.narrow(1, 0, 1)}, 1); }},
      {"division", [](const at::Tensor& x) { return x.div(3, "floor") / x; }},
      {"elementwise",
       [](const at::Tensor& x) { return (-x.exp() + x.cos() * x.sin()) * 2.0 + 1.0; }},
      {"embedding",
       [](const at::Tensor& x) { return at::embedding(x.flatten(0, 2), indices_beside(x)); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
      {"index", [](const at::Tensor& x) { return x.index({indices_beside(x)}); }},
      {"index_copy",
       [](const at::Tensor& x) { return x.index_copy(0, indices_beside(x).select(1, 0), x * x); }},
      {"index_select",
       [](const at::Tensor& x) { return x.index_select(-1, indices_beside(x).flatten()); }},
      {"layer_norm",
       [](const at::Tensor& x) { return at::layer_norm(x, {8}, x[0][0][0], x[0][0][1]); }},
      {"linear", [](const at::Tensor& x) { return at::linear(x, x[0][0], x[0][0].select(1, 0)); }},
      {"matmul", [](const at::Tensor& x) { return at::matmul(x, x.transpose(2, 3)); }},
      {"norm", [](const at::Tensor& x) { return x * (x.pow(2).mean(-1, true) + 1e-6).rsqrt(); }},
      {"promotion", [](const at::Tensor& x) { return x + x.to(at::kDouble); }},
      {"scalar_tensor",
       [](const at::Tensor& x) { return at::scalar_tensor(1.0, x.options()) * x.to(at::kLong); }},
      {"silu", [](const at::Tensor& x) { return at::silu(x) * x.sigmoid(); }},
      {"softmax", [](const at::Tensor& x) { return at::softmax(x, -1, at::kFloat); }},
      {"softplus", [](const at::Tensor& x) { return at::softplus(x); }},
      {"sort", [](const at::Tensor& x) { return std::get<1>(x.sort(-1)); }},
      {"sum", [](const at::Tensor& x) { return x.sum(1); }},
      {"topk", [](const at::Tensor& x) { return std::get<0>(x.topk(3, -1)); }},
      {"where", [](const at::Tensor& x) { return at::where(x[0] > 0, x[0][0][0], x); }},
      {"zeros", [](const at::Tensor& x) { return at::zeros({3, 2}, x.options()); }},
  };
  return operations;
}

at::Tensor given(at::ScalarType dtype) { return (at::randn({2, 4, 6, 8}) + 3).to(dtype); }

TEST(ShapeRules, GiveTheShapeAndDtypeOfNumbers) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor x = given(dtype);
    for (const auto& [name, operation] : operations()) {
      const at::Tensor expected = operation(x);
      const ShapeRules rules;
      const at::Tensor told = operation(x.to(at::kMeta));
      EXPECT_TRUE(told.is_meta()) << name;
      EXPECT_EQ(told.sizes(), expected.sizes()) << name;
      EXPECT_EQ(told.scalar_type(), expected.scalar_type()) << name;
    }
  }
}

TEST(ShapeRules, LeaveNumbersAsTheyAre) {
  const at::Tensor x = given(at::kFloat);
  for (const auto& [name, operation] : operations()) {
    const at::Tensor expected = operation(x);
    const ShapeRules rules;
    EXPECT_TRUE(at::equal(operation(x), expected)) << name;
  }
}

TEST(ShapeRules, EndWithTheirScope) {
  const auto before = c10::impl::tls_local_dispatch_key_set().included_;
  {
    const ShapeRules rules;
    EXPECT_NE(c10::impl::tls_local_dispatch_key_set().included_, before);
  }
  EXPECT_EQ(c10::impl::tls_local_dispatch_key_set().included_, before);
}

}  // namespace
}  // namespace vlscope::ops
