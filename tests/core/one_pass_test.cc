// Norms and rotations in one pass, against the composed operations: the same bits.
#include "core/ops/one_pass.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/ops/rotary.h"
#include "core/ops/torch_ops.h"

namespace vlscope {
namespace {

using ops::NormForm;

at::Tensor composed_norm(const at::Tensor& x, const at::Tensor& weight, NormForm form) {
  return ops::composed::rms_norm(x, weight, 1e-6, form == NormForm::kZeroCentered);
}

TEST(OnePassNorm, HasTheBitsOfTheComposedOperations) {
  for (const std::int64_t width : {1, 7, 16, 72, 128, 1024, 2049, 5120}) {
    for (const std::int64_t rows : {1, 3, 64, 700}) {
      const at::Tensor x = at::randn({1, rows, width}) * 3, weight = at::randn({width});
      ASSERT_TRUE(ops::one_pass::norms(x, weight));
      for (const NormForm form : {NormForm::kPlain, NormForm::kZeroCentered}) {
        EXPECT_TRUE(at::equal(ops::one_pass::rms_norm(x, weight, 1e-6, form),
                              composed_norm(x, weight, form)))
            << rows << " rows of " << width;
      }
    }
  }
}

TEST(OnePassNorm, KeepsWhatArithmeticMakesOfExtremes) {
  const auto infinity = std::numeric_limits<float>::infinity();
  const at::Tensor rows = at::cat({at::full({1, 8}, 0.0f), at::full({1, 8}, 1e-30f),
                                   at::full({1, 8}, 1e30f), at::full({1, 8}, infinity)});
  const at::Tensor weight = at::randn({8});
  const at::Tensor out = ops::one_pass::rms_norm(rows, weight, 1e-6, NormForm::kPlain);
  const at::Tensor expected = composed_norm(rows, weight, NormForm::kPlain);
  EXPECT_TRUE(at::equal(out.nan_to_num(7), expected.nan_to_num(7)));
}

TEST(OnePassNorm, LeavesGraphsAndOtherDtypesToTheComposedOperations) {
  const at::Tensor x = at::randn({4, 8}), weight = at::randn({8});
  EXPECT_FALSE(ops::one_pass::norms(x.to(at::kBFloat16), weight.to(at::kBFloat16)));
  EXPECT_FALSE(ops::one_pass::norms(x.to(at::kDouble), weight.to(at::kDouble)));
  EXPECT_FALSE(ops::one_pass::norms(x.transpose(0, 1), at::randn({4})));
  EXPECT_FALSE(ops::one_pass::norms(x.clone().requires_grad_(), weight));
  const at::Tensor by_graph =
      ops::rms_norm(x.clone().requires_grad_(), weight, 1e-6, NormForm::kPlain);
  EXPECT_TRUE(by_graph.requires_grad());
  EXPECT_TRUE(at::equal(by_graph, ops::rms_norm(x, weight, 1e-6, NormForm::kPlain)));
}

void expect_same_rotation(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  ASSERT_TRUE(ops::one_pass::rotates(x, cos, sin));
  const at::Tensor out = ops::one_pass::rotate(x, cos, sin);
  const at::Tensor expected = ops::composed_rotate(x, cos, sin);
  EXPECT_TRUE(at::equal(out, expected));
  EXPECT_EQ(out.strides(), expected.strides());
}

TEST(OnePassRotation, HasTheBitsOfTheComposedOperations) {
  for (const std::int64_t width : {8, 24, 72, 128}) {
    // Heads of a projection, with tables shared by the heads.
    const at::Tensor x = at::randn({2, 61, 5, width}).transpose(1, 2);
    for (const std::int64_t turned : {width, width / 4 * 2}) {
      expect_same_rotation(x, at::rand({2, 1, 61, turned}), at::rand({2, 1, 61, turned}));
    }
    // Queries cut out of a joint projection.
    const at::Tensor rows = at::randn({700, 3, 4, width});
    expect_same_rotation(rows.select(1, 1), at::rand({700, 1, width}), at::rand({700, 1, width}));
  }
}

TEST(OnePassRotation, LeavesGraphsAndOtherDtypesToTheComposedOperations) {
  const at::Tensor x = at::randn({3, 4, 8}), cos = at::rand({3, 1, 8}), sin = at::rand({3, 1, 8});
  EXPECT_FALSE(ops::one_pass::rotates(x.to(at::kHalf), cos.to(at::kHalf), sin.to(at::kHalf)));
  EXPECT_FALSE(ops::one_pass::rotates(x.clone().requires_grad_(), cos, sin));
  EXPECT_TRUE(ops::rotate(x.clone().requires_grad_(), cos, sin).requires_grad());
}

TEST(OnePass, HasTheSameBitsForAnyNumberOfThreads) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the barriers of OpenMP are not seen";
#endif
  const at::Tensor x = at::randn({1, 900, 256}), weight = at::randn({256});
  const at::Tensor heads = x.view({1, 900, 2, 128}).transpose(1, 2);
  const at::Tensor cos = at::rand({1, 1, 900, 128}), sin = at::rand({1, 1, 900, 128});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor norm = ops::rms_norm(x, weight, 1e-6, NormForm::kPlain);
  const at::Tensor rotated = ops::rotate(heads, cos, sin);
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(ops::rms_norm(x, weight, 1e-6, NormForm::kPlain), norm));
  EXPECT_TRUE(at::equal(ops::rotate(heads, cos, sin), rotated));
  at::set_num_threads(before);
}

}  // namespace
}  // namespace vlscope
