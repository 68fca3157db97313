// The mixture against a computation by hand: every expert on every token, weighted by zero where it
// is not chosen.
#include "models/text/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/errors.h"
#include "hooks/tree.h"

namespace vlscope {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kBatch = 2, kSeq = 5, kWidth = 12, kInner = 6, kExperts = 5, kTopK = 2;

TextConfig config() {
  TextConfig config{};
  config.hidden_size = kWidth;
  config.hidden_act = "silu";
  config.mixture = MixtureConfig{kExperts, kTopK, kInner, 1, {}};
  return config;
}

/// A mixture of random weights, alone in its tree.
class MixtureTest : public ::testing::Test {
 protected:
  MixtureTest() {
    std::vector<const Location*> visited;
    fill(at::TensorOptions(at::kMeta));
    Trace::Options options;
    options.visitor = [&](const Location& location, at::Tensor* const*, std::size_t) {
      visited.push_back(&location);
    };
    forward(at::zeros({1, 1, kWidth}, at::TensorOptions(at::kMeta)), std::move(options))->finish();
    tree_->number(visited, visited);
    fill(at::TensorOptions(at::kFloat));
  }

  void fill(const at::TensorOptions& options) {
    for (const Module* module : tree_->modules()) {
      for (const Parameter& parameter : module->parameters()) {
        *parameter.tensor = at::randn(parameter.shape, options);
      }
    }
  }

  const at::Tensor& weight(const std::string& module, const std::string& name) const {
    for (const Module* candidate : tree_->modules()) {
      if (candidate->name() != module) continue;
      for (const Parameter& parameter : candidate->parameters()) {
        if (parameter.name == name) return *parameter.tensor;
      }
    }
    throw std::logic_error(name);
  }

  std::unique_ptr<Trace> forward(const at::Tensor& x, Trace::Options options = {}) {
    options.batch = x.size(0);
    return std::make_unique<Trace>(
        tree_, [this, x](Trace& trace) { return mixture_(trace, x); }, std::move(options));
  }

  const Site& site(const std::string& path) const {
    for (const Site& site : tree_->sites()) {
      if (site.path == path) return site;
    }
    throw std::logic_error(path);
  }

  /// All experts on all tokens.
  at::Tensor by_hand(const at::Tensor& x) const {
    const at::Tensor p = at::softmax(at::linear(x, weight("gate", "weight")), -1);
    const auto [values, indices] = at::topk(p, kTopK, -1);
    const at::Tensor weights =
        at::zeros_like(p).scatter(-1, indices, values / values.sum(-1, true));
    at::Tensor y = at::zeros_like(x);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const at::Tensor inner = at::linear(x, weight("experts", "gate_up_proj")[e]);
      const at::Tensor h = at::silu(inner.narrow(-1, 0, kInner)) * inner.narrow(-1, kInner, kInner);
      y = y +
          weights.select(-1, e).unsqueeze(-1) * at::linear(h, weight("experts", "down_proj")[e]);
    }
    return y;
  }

  TextMixture mixture_{nullptr, "mlp", config()};
  std::shared_ptr<Tree> tree_ = std::make_shared<Tree>(mixture_);
  at::Tensor x_ = at::randn({kBatch, kSeq, kWidth});
};

TEST_F(MixtureTest, IsTheWeightedSumOfTheChosenExperts) {
  EXPECT_TRUE(at::allclose(forward(x_)->finish(), by_hand(x_), 1e-5, 1e-5));
}

TEST_F(MixtureTest, DoesNotReadAnExpertThatNoTokenGoesTo) {
  const auto trace = forward(x_.slice(1, 0, 1).slice(0, 0, 1));
  const at::Tensor chosen = trace->read(site("expert_indices")).reshape(-1);
  at::Tensor poisoned = weight("experts", "gate_up_proj");
  for (std::int64_t e = 0; e < kExperts; ++e) {
    if (!(chosen == e).any().item<bool>()) poisoned[e].fill_(std::nan(""));
  }
  EXPECT_FALSE(trace->finish().isnan().any().item<bool>());
}

TEST_F(MixtureTest, GivesTheSameBitsWithItsAxesExchangedInMemory) {
  const at::Tensor expected = forward(x_)->finish();
  for (const char* name : {"gate_up_proj", "down_proj"}) {
    auto& stored = const_cast<at::Tensor&>(weight("experts", name));
    stored = stored.transpose(1, 2).contiguous().transpose(1, 2);
    ASSERT_FALSE(stored.is_contiguous());
  }
  EXPECT_TRUE(forward(x_)->finish().equal(expected));
}

TEST_F(MixtureTest, ServesTheTokensOfEachPromptByThemselves) {
  const auto trace = forward(x_);
  EXPECT_EQ(trace->read(site("router_logits")).sizes(), at::IntArrayRef({kBatch, kSeq, kExperts}));
  const at::Tensor weights = trace->read(site("expert_weights"));
  EXPECT_EQ(weights.sizes(), at::IntArrayRef({kBatch, kSeq, kTopK}));
  EXPECT_TRUE(at::allclose(weights.sum(-1), at::zeros({kBatch, kSeq}) + 1));
  const at::Tensor slots = trace->read(site("expert_outputs"));
  EXPECT_EQ(slots.sizes(), at::IntArrayRef({kBatch, kSeq, kTopK, kWidth}));
  EXPECT_TRUE(trace->read(site("routed_output")).equal(slots.sum(2)));
}

TEST_F(MixtureTest, AWeightOfZeroTakesItsSlotOut) {
  auto trace = forward(x_);
  at::Tensor slots = trace->read(site("expert_outputs")).clone();
  trace = forward(x_);
  trace->read(site("expert_weights")).select(-1, 1).zero_();
  EXPECT_TRUE(trace->finish().equal(slots.select(2, 0) + 0 * slots.select(2, 1)));
}

TEST_F(MixtureTest, AnIndexThatNamesNoExpertIsRefused) {
  for (const std::int64_t wrong : {kExperts, std::int64_t{-1}}) {
    const auto trace = forward(x_);
    trace->read(site("expert_indices")).fill_(wrong);
    try {
      trace->finish();
      ADD_FAILURE() << wrong << " was accepted";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::to_string(wrong) + "; the experts are 0 to 4"));
    }
  }
}

TEST_F(MixtureTest, KeepsFloat64AsItIs) {
  for (const Module* module : tree_->modules()) {
    for (const Parameter& parameter : module->parameters()) {
      *parameter.tensor = parameter.tensor->to(at::kDouble);
    }
  }
  const at::Tensor x = x_.to(at::kDouble);
  EXPECT_TRUE(at::allclose(forward(x)->finish(), by_hand(x), 1e-13, 1e-13));
}

}  // namespace
}  // namespace vlscope
