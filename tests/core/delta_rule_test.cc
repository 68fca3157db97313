// The gated delta rule: both forms against a plain loop over numbers, states, cuts, convolutions.
#include "core/ops/delta_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace vlscope {
namespace {

using ops::DeltaRuleInput;
using ops::DeltaRuleResult;

constexpr std::int64_t kBatch = 2, kHeads = 3, kKey = 8, kValue = 5;

DeltaRuleInput tokens(std::int64_t seq, at::ScalarType dtype = at::kDouble) {
  const auto options = at::TensorOptions(dtype);
  DeltaRuleInput in;
  in.q = at::randn({kBatch, seq, kHeads, kKey}, options);
  in.k = at::randn({kBatch, seq, kHeads, kKey}, options);
  in.v = at::randn({kBatch, seq, kHeads, kValue}, options);
  in.decays = -at::rand({kBatch, seq, kHeads}, options);
  in.betas = at::rand({kBatch, seq, kHeads}, options);
  in.state = at::randn({kBatch, kHeads, kKey, kValue}, options);
  return in;
}

/// The rule of one head, written over numbers.
struct PlainLoop {
  double s[kKey][kValue];

  PlainLoop(const DeltaRuleInput& in, std::int64_t row, std::int64_t head) {
    for (int i = 0; i < kKey; ++i) {
      for (int j = 0; j < kValue; ++j) s[i][j] = in.state[row][head][i][j].item<double>();
    }
  }

  static std::vector<double> unit(const at::Tensor& x) {
    std::vector<double> result;
    double squares = 0;
    for (std::int64_t i = 0; i < x.size(0); ++i) {
      result.push_back(x[i].item<double>());
      squares += result.back() * result.back();
    }
    for (double& element : result) element /= std::sqrt(squares + 1e-6);
    return result;
  }

  std::vector<double> next(const DeltaRuleInput& in, std::int64_t row, std::int64_t t,
                           std::int64_t head) {
    const std::vector<double> q = unit(in.q[row][t][head]), k = unit(in.k[row][t][head]);
    const double decay = std::exp(in.decays[row][t][head].item<double>());
    const double beta = in.betas[row][t][head].item<double>();
    std::vector<double> out;
    for (int j = 0; j < kValue; ++j) {
      double held = 0, read = 0;
      for (int i = 0; i < kKey; ++i) held += (s[i][j] *= decay) * k[i];
      const double written = beta * (in.v[row][t][head][j].item<double>() - held);
      for (int i = 0; i < kKey; ++i) read += (s[i][j] += k[i] * written) * q[i];
      out.push_back(read / std::sqrt(static_cast<double>(kKey)));
    }
    return out;
  }
};

void expect_plain(const DeltaRuleInput& in, const DeltaRuleResult& result) {
  for (std::int64_t row = 0; row < kBatch; ++row) {
    for (std::int64_t head = 0; head < kHeads; ++head) {
      PlainLoop loop(in, row, head);
      for (std::int64_t t = 0; t < in.seq(); ++t) {
        const std::vector<double> expected = loop.next(in, row, t, head);
        for (int j = 0; j < kValue; ++j) {
          ASSERT_NEAR(result.heads[row][t][head][j].item<double>(), expected[j], 1e-9);
        }
      }
      for (int i = 0; i < kKey; ++i) {
        for (int j = 0; j < kValue; ++j) {
          ASSERT_NEAR(result.state[row][head][i][j].item<double>(), loop.s[i][j], 1e-9);
        }
      }
    }
  }
}

TEST(DeltaRule, BothFormsAreThePlainLoopWithinAndAcrossChunks) {
  for (const std::int64_t seq : {1, 5, 64, 70}) {
    const DeltaRuleInput in = tokens(seq);
    expect_plain(in, ops::chunked_delta_rule(in));
    expect_plain(in, ops::recurrent_delta_rule(in));
  }
}

TEST(DeltaRule, BothFormsAgreeOverManyChunks) {
  const DeltaRuleInput in = tokens(200, at::kFloat);
  const DeltaRuleResult chunked = ops::chunked_delta_rule(in);
  const DeltaRuleResult recurrent = ops::recurrent_delta_rule(in);
  EXPECT_TRUE(at::allclose(chunked.heads, recurrent.heads, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(chunked.state, recurrent.state, 1e-4, 1e-5));
}

TEST(DeltaRule, TwoRunsInTurnAreOneRun) {
  const DeltaRuleInput in = tokens(90);
  const DeltaRuleResult whole = ops::chunked_delta_rule(in);
  const DeltaRuleResult first = ops::chunked_delta_rule(in.part(0, 70, in.state));
  const DeltaRuleResult second = ops::chunked_delta_rule(in.part(70, 90, first.state));
  EXPECT_TRUE(at::allclose(at::cat({first.heads, second.heads}, 1), whole.heads));
  EXPECT_TRUE(at::allclose(second.state, whole.state));
}

TEST(DeltaRule, ATokenWithoutDecayAndBetaLeavesTheState) {
  DeltaRuleInput in = tokens(70);
  in.decays = at::zeros(in.decays.sizes(), in.decays.options());
  in.betas = at::zeros(in.betas.sizes(), in.betas.options());
  EXPECT_TRUE(at::allclose(ops::chunked_delta_rule(in).state, in.state));
}

TEST(DeltaRule, HeadsComeInTheDtypeOfTheQueriesAndStatesInFloat32) {
  for (const auto rule : {ops::chunked_delta_rule, ops::recurrent_delta_rule}) {
    const DeltaRuleResult result = rule(tokens(3, at::kBFloat16));
    EXPECT_EQ(result.heads.scalar_type(), at::kBFloat16);
    EXPECT_EQ(result.state.scalar_type(), at::kFloat);
  }
}

TEST(DeltaRuleStates, AreWhatTheTokensReadAndEndInTheLast) {
  const DeltaRuleInput in = tokens(70);
  const DeltaRuleResult result = ops::recurrent_delta_rule(in);
  const at::Tensor states = ops::delta_rule_states(in, {});
  EXPECT_EQ(states.sizes(), (std::vector<std::int64_t>{kBatch, 70, kHeads, kKey, kValue}));
  EXPECT_TRUE(at::equal(states.select(1, 69), result.state));
  EXPECT_TRUE(at::allclose(ops::read_states(states, in.q), result.heads));
  for (const std::int64_t token : {0, 31, 69}) {
    EXPECT_TRUE(at::equal(ops::delta_rule_state(in, {}, token), states.select(1, token)));
  }
}

TEST(DeltaRuleCuts, TheTokenReadsTheNewStateAndTheNextGoesOnFromIt) {
  const DeltaRuleInput in = tokens(70);
  const at::Tensor other = at::randn(in.state.sizes(), in.state.options());
  const std::vector<ops::StateCut> cuts{{0, at::zeros(in.state.sizes(), in.state.options())},
                                        {40, other}};
  const at::Tensor states = ops::delta_rule_states(in, cuts);
  EXPECT_TRUE(at::equal(states.select(1, 40), other));
  EXPECT_TRUE(
      at::allclose(states.select(1, 69), ops::recurrent_delta_rule(in.part(41, 70, other)).state));
  for (const auto rule : {ops::chunked_delta_rule, ops::recurrent_delta_rule}) {
    const DeltaRuleResult result = ops::delta_rule_with(in, cuts, rule);
    EXPECT_TRUE(at::allclose(result.heads, ops::read_states(states, in.q)));
    EXPECT_TRUE(at::allclose(result.state, states.select(1, 69)));
  }
  for (const std::int64_t token : {0, 39, 40, 69}) {
    EXPECT_TRUE(at::allclose(ops::delta_rule_state(in, cuts, token), states.select(1, token)));
  }
}

TEST(DeltaRuleCuts, ACutAtTheLastTokenIsTheFinalState) {
  const DeltaRuleInput in = tokens(3);
  const at::Tensor other = at::randn(in.state.sizes(), in.state.options());
  const DeltaRuleResult result = ops::delta_rule_with(in, {{2, other}}, ops::recurrent_delta_rule);
  EXPECT_TRUE(at::equal(result.state, other));
  EXPECT_EQ(result.heads.size(1), 3);
}

TEST(CausalConvolution, WeighsATokenAndThoseBeforeIt) {
  const at::Tensor x = at::randn({2, 6, 9}, at::kDouble),
                   weight = at::randn({6, 1, 4}, at::kDouble);
  const at::Tensor y = ops::causal_convolution(x, weight, {});
  const at::Tensor before = at::cat({at::zeros({2, 6, 3}, at::kDouble), x}, 2);
  std::vector<at::Tensor> expected;
  for (std::int64_t t = 0; t < 9; ++t) {
    expected.push_back((before.narrow(2, t, 4) * weight.squeeze(1)).sum(-1));
  }
  EXPECT_TRUE(at::allclose(y, at::stack(expected, 2)));
}

TEST(CausalConvolution, GoesOnFromWhatCameBefore) {
  const at::Tensor x = at::randn({2, 6, 9}), weight = at::randn({6, 1, 4});
  const at::Tensor whole = ops::causal_convolution(x, weight, {});
  for (const std::int64_t rest : {1, 3}) {
    const at::Tensor later =
        ops::causal_convolution(x.narrow(2, 9 - rest, rest), weight, x.narrow(2, 9 - rest - 4, 4));
    EXPECT_TRUE(at::allclose(later, whole.narrow(2, 9 - rest, rest)));
  }
}

}  // namespace
}  // namespace vlscope
