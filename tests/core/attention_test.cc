// Rows of a pattern against the whole: grouped heads, masks of both kinds, queries of a later step.
#include "core/ops/attention.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <vector>

namespace vlscope {
namespace {

constexpr double kScale = 0.25;

struct Step {
  at::Tensor q = at::rand({2, 6, 7, 16}), k = at::rand({2, 2, 7, 16});
};

at::Tensor padded() {
  return at::tensor(std::vector<std::int64_t>{0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1})
      .view({2, 7});
}

void expect_rows(const Step& step, const at::Tensor& mask) {
  const at::Tensor whole = ops::attention_scores(step.q, step.k, mask, kScale);
  const at::Tensor rows = ops::score_rows(step.q, step.k, mask, kScale, {{5, 0, 3}, {0, 6, 2, 2}});
  const at::Tensor expected =
      whole.index_select(1, at::tensor(std::vector<std::int64_t>{5, 0, 3}))
          .index_select(2, at::tensor(std::vector<std::int64_t>{0, 6, 2, 2}));
  EXPECT_TRUE(at::allclose(rows, expected));
}

TEST(ScoreRows, EqualThoseOfTheCausalPattern) { expect_rows({}, {}); }

TEST(ScoreRows, EqualThoseUnderABooleanMask) { expect_rows({}, ops::causal_mask(padded(), 7)); }

TEST(ScoreRows, EqualThoseUnderAnAdditiveMask) {
  expect_rows({}, ops::additive_mask(ops::causal_mask(padded(), 7), at::kFloat));
}

TEST(ScoreRows, QueriesOfALaterStepStandAtTheEndOfTheKeys) {
  const Step step;
  const at::Tensor whole = ops::attention_scores(step.q, step.k, {}, kScale);
  const at::Tensor last = step.q.narrow(2, 5, 2);
  const at::Tensor rows = ops::score_rows(last, step.k, {}, kScale, {{0, 1, 2, 3, 4, 5}, {0, 1}});
  EXPECT_TRUE(at::allclose(rows, whole.narrow(2, 5, 2)));
}

}  // namespace
}  // namespace vlscope
