// A forward with all that a location can be: of several tensors, seen through views, on demand,
// and reached with an image only.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "hooks/trace.h"
#include "tests/hooks/message_of.h"

namespace vlscope {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Kind kEye{"Eye",
                "Patches, doubled twice.",
                {{"x"}},
                Form::kTensor,
                {{"x"}},
                {{"patches", "Patches", "images patches width", "", "output", 0, View::kImagesAxis},
                 {"index", "Tokens", "patches width", "", "output", 0, View::kCopy,
                  "index follows from the patches: assign patches"},
                 {"prompts", "Residual", "batch seq width", "", "output", 0, View::kBatchAxis},
                 {"pattern", "Pattern", "", "", "output", 0, View::kWhole, "",
                  "no one tensor is the pattern"}}};
const Kind kHead{
    "Head", "Scores, and their sum for who asks.", {{"x"}}, Form::kTuple, {{"scores"}, {"total"}}};
const Kind kTower{"Tower", "An eye and a head.", {{"x"}, {"absent", true}}, Form::kTensor, {{"x"}}};

/// y = 2 x.
class Lens : public Module {
 public:
  explicit Lens(Module* parent) : Module(parent, "lens", kinds::linear) {}
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const {
    co_await trace.at(input, x);
    x = x * 2;
    co_await trace.at(output, x);
    co_return x;
  }
};

/// y = 2 lens(x).
class Eye : public Module {
 public:
  explicit Eye(Module* parent) : Module(parent, "eye", kEye) {}
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const {
    co_await trace.at(input, x);
    if (!trace.skip(*this, x)) x = co_await lens(trace, std::move(x)) * 2;
    co_await trace.at(output, x);
    co_return x;
  }
  Lens lens{this};
};

/// scores = x + 1; total = the sum of the scores, computed when asked for.
class Head : public Module {
 public:
  explicit Head(Module* parent) : Module(parent, "head", kHead) {}
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const {
    co_await trace.at(input, x);
    at::Tensor scores = x + 1, total;
    do {
      if (trace.wants(output, 1) || trace.listing()) {
        total = scores.sum();
        ++totals;
      }
      co_await trace.on_demand(output, scores, total);
    } while (trace.asked_again());
    co_return scores;
  }
  mutable int totals = 0;
};

class Tower : public Module {
 public:
  Tower() : Module(nullptr, "", kTower) {}
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, bool with_image) const {
    at::Tensor absent;
    co_await trace.at(input, x, absent);
    if (with_image) x = co_await eye(trace, std::move(x));
    x = co_await head(trace, std::move(x));
    co_await trace.at(output, x);
    co_return x;
  }
  Eye eye{this};
  Head head{this};
};

class TowerTest : public ::testing::Test {
 protected:
  TowerTest() : tree(std::make_shared<Tree>(tower)) {
    tree->number(visited(false), visited(true));
    tower.head.totals = 0;
  }

  std::vector<const Location*> visited(bool with_image) {
    std::vector<const Location*> locations;
    Trace::Options options;
    options.visitor = [&](const Location& location, at::Tensor* const*, std::size_t) {
      locations.push_back(&location);
    };
    Trace(tree, forward(with_image), std::move(options)).finish();
    return locations;
  }
  Trace::Forward forward(bool with_image) {
    return [this, with_image](Trace& trace) { return tower(trace, x, with_image); };
  }
  Trace trace(bool with_image = true) {
    Trace::Options options;
    options.images = with_image;
    options.batch = 2;
    return Trace(tree, forward(with_image), std::move(options));
  }
  const Site& output(const Module& module, int slot = 0) {
    return tree->sites()[tree->first_output(module) + slot];
  }
  const Site& input(const Module& module, int slot = 0) {
    return tree->sites()[tree->first_input(module) + slot];
  }
  const Site& value(const std::string& path) {
    return *std::find_if(tree->sites().begin(), tree->sites().end(),
                         [&](const Site& site) { return site.path == path; });
  }

  Tower tower;
  const at::Tensor x = at::ones({2, 3});
  std::shared_ptr<Tree> tree;
};

TEST_F(TowerTest, WhatOnlyAnImageReachesIsVisual) {
  EXPECT_TRUE(tower.eye.input.visual());
  EXPECT_TRUE(tower.eye.lens.output.visual());
  EXPECT_FALSE(tower.input.visual());
  EXPECT_FALSE(tower.head.output.visual());
}

TEST_F(TowerTest, AVisualValueOfATextIsRefusedBeforeTheForwardMoves) {
  Trace run = trace(/*with_image=*/false);
  EXPECT_THAT(message_of<NotReachedError>([&] { run.read(value("eye.patches")); }),
              AllOf(HasSubstr("eye.patches"), HasSubstr("no image")));
  EXPECT_TRUE(run.read(input(tower)).equal(x));
}

TEST_F(TowerTest, NothingInsideASkippedModuleIsReached) {
  Trace run = trace();
  run.replace(tower.eye, at::full({2, 3}, 5.0));
  EXPECT_THAT(message_of<NotReachedError>([&] { run.read(output(tower.eye.lens)); }),
              AllOf(HasSubstr("eye.lens.output"), HasSubstr("eye is skipped")));
  EXPECT_TRUE(run.read(input(tower.eye)).equal(x));
  EXPECT_TRUE(run.read(output(tower.eye)).equal(at::full({2, 3}, 5.0)));
  EXPECT_TRUE(run.finish().equal(at::full({2, 3}, 6.0)));
}

TEST_F(TowerTest, AModuleMayStillBeSkippedFromItsInputButNotFromInside) {
  Trace run = trace();
  run.read(input(tower.eye));
  run.replace(tower.eye, at::zeros({2, 3}));
  EXPECT_TRUE(run.finish().equal(x));

  Trace inside = trace();
  inside.read(input(tower.eye.lens));
  EXPECT_THAT(message_of<OutOfOrderError>([&] { inside.replace(tower.eye, at::zeros({2, 3})); }),
              AllOf(HasSubstr("eye cannot be skipped"), HasSubstr("eye.lens.input")));
}

TEST_F(TowerTest, AReplacementOfAnotherShapeIsRefusedNamingBoth) {
  Trace run = trace();
  run.replace(tower.eye, at::zeros({2, 4}));
  EXPECT_THAT(message_of<InputError>([&] { run.finish(); }),
              AllOf(HasSubstr("eye is skipped with [2, 4]"), HasSubstr("is [2, 3]")));
}

TEST_F(TowerTest, TheImagesAxisIsAddedInFrontAndSharesTheStorage) {
  Trace run = trace();
  const at::Tensor patches = run.read(value("eye.patches"));
  EXPECT_THAT(patches.sizes().vec(), ElementsAre(1, 2, 3));
  EXPECT_TRUE(run.read(value("eye.patches")).is_same(patches));
  run.read(output(tower.eye)).add_(1);
  EXPECT_TRUE(patches.equal(at::full({1, 2, 3}, 5.0)));
  EXPECT_TRUE(run.finish().equal(at::full({2, 3}, 6.0)));
}

TEST_F(TowerTest, PatchesAreAssignedWithAndWithoutTheImagesAxis) {
  Trace with_axis = trace(), without = trace();
  with_axis.write(value("eye.patches"), at::full({1, 2, 3}, 7.0));
  without.write(value("eye.patches"), at::full({2, 3}, 7.0));
  EXPECT_THAT(with_axis.read(output(tower.eye)).sizes().vec(), ElementsAre(2, 3));
  EXPECT_THAT(without.read(value("eye.patches")).sizes().vec(), ElementsAre(1, 2, 3));
  EXPECT_TRUE(with_axis.finish().equal(at::full({2, 3}, 8.0)));
  EXPECT_TRUE(without.finish().equal(at::full({2, 3}, 8.0)));
}

TEST_F(TowerTest, PatchesOfAnotherShapeAreRefusedNamingBoth) {
  Trace run = trace();
  const auto refusal = [&](at::Tensor patches) {
    return message_of<InputError>([&] { run.write(value("eye.patches"), patches); });
  };
  EXPECT_THAT(refusal(at::zeros({2, 2, 3})), AllOf(HasSubstr("[1, 2, 3]"), HasSubstr("[2, 2, 3]")));
  EXPECT_THAT(refusal(at::zeros({3})), AllOf(HasSubstr("[1, 2, 3]"), HasSubstr("[3] float32")));
}

TEST_F(TowerTest, GradientsPassThroughTheImagesAxis) {
  Trace run = trace();
  const at::Tensor patches = run.read(value("eye.patches")).requires_grad_();
  run.finish().sum().backward();
  ASSERT_TRUE(patches.grad().defined());
  EXPECT_TRUE(patches.grad().equal(at::ones({1, 2, 3})));
}

TEST_F(TowerTest, RowsOfAllPromptsAreServedPromptByPrompt) {
  Trace run = trace();
  const at::Tensor prompts = run.read(value("eye.prompts"));
  EXPECT_THAT(prompts.sizes().vec(), ElementsAre(2, 1, 3));
  EXPECT_TRUE(run.read(value("eye.prompts")).is_same(prompts));
  run.read(output(tower.eye)).add_(1);
  EXPECT_TRUE(prompts.equal(at::full({2, 1, 3}, 5.0)));
  EXPECT_TRUE(run.finish().equal(at::full({2, 3}, 6.0)));
}

TEST_F(TowerTest, RowsOfAllPromptsAreAssignedInBothForms) {
  for (const auto& shape : {std::vector<std::int64_t>{2, 1, 3}, std::vector<std::int64_t>{2, 3}}) {
    Trace run = trace();
    run.write(value("eye.prompts"), at::full(shape, 7.0));
    EXPECT_THAT(run.read(value("eye.prompts")).sizes().vec(), ElementsAre(2, 1, 3));
    EXPECT_TRUE(run.finish().equal(at::full({2, 3}, 8.0)));
  }
}

TEST_F(TowerTest, AnAssignedTensorIsEditedInPlaceWhereverItLiesInMemory) {
  Trace run = trace();
  const at::Tensor strided = at::zeros({3, 1, 2}).transpose(0, 2);
  run.write(value("eye.prompts"), strided);
  strided.fill_(7);
  EXPECT_TRUE(run.finish().equal(at::full({2, 3}, 8.0)));
}

TEST_F(TowerTest, GradientsPassThroughTheBatchAxis) {
  Trace run = trace();
  const at::Tensor prompts = run.read(value("eye.prompts")).requires_grad_();
  run.finish().sum().backward();
  ASSERT_TRUE(prompts.grad().defined());
  EXPECT_TRUE(prompts.grad().equal(at::ones({2, 1, 3})));
}

TEST_F(TowerTest, ACopyIsEditedWithoutEffectAndNeverAssigned) {
  Trace run = trace();
  const at::Tensor index = run.read(value("eye.index"));
  index.zero_();
  EXPECT_THAT(message_of<InputError>([&] { run.write(value("eye.index"), index); }),
              AllOf(HasSubstr("eye.index is read-only"), HasSubstr("assign patches")));
  EXPECT_TRUE(run.read(output(tower.eye)).equal(x * 4));
  index.fill_(9);
  EXPECT_TRUE(run.finish().equal(x * 4 + 1));
}

TEST_F(TowerTest, AnUnavailableValueSaysWhyBeforeTheForwardMoves) {
  Trace run = trace();
  EXPECT_THAT(message_of<Unavailable>([&] { run.read(value("eye.pattern")); }),
              HasSubstr("eye.pattern is unavailable: no one tensor is the pattern"));
  EXPECT_TRUE(run.read(input(tower)).equal(x));
}

TEST_F(TowerTest, AnAbsentTensorIsReadAsUndefinedAndNeverAssigned) {
  Trace run = trace();
  EXPECT_EQ(run.slots(input(tower)), 2);
  EXPECT_FALSE(run.read(input(tower, 1)).defined());
  EXPECT_THAT(message_of<InputError>([&] { run.write(input(tower, 1), x); }),
              HasSubstr("is None here"));
}

TEST_F(TowerTest, ATensorBeyondTheLastIsRefusedWithTheirNumber) {
  Trace run = trace();
  Site beyond = input(tower);
  beyond.slot = 2;
  EXPECT_THAT(message_of<NotReachedError>([&] { run.read(beyond); }),
              HasSubstr("input has 2 tensors here, and none at 2"));
}

TEST_F(TowerTest, WhatIsOnDemandIsComputedOnlyWhenAskedFor) {
  trace().finish();
  trace().read(output(tower.head));
  EXPECT_EQ(tower.head.totals, 0);
  EXPECT_EQ(trace().read(output(tower.head, 1)).item<float>(), 30);
  EXPECT_EQ(tower.head.totals, 1);
}

TEST_F(TowerTest, WhatIsOnDemandIsComputedBehindAnotherReadOfItsLocation) {
  Trace run = trace();
  const at::Tensor scores = run.read(output(tower.head));
  EXPECT_EQ(run.read(output(tower.head, 1)).item<float>(), 30);
  EXPECT_TRUE(run.read(output(tower.head)).is_same(scores));
  EXPECT_EQ(tower.head.totals, 1);
}

TEST_F(TowerTest, WhatIsOnDemandFollowsAnEditAndAnAssignment) {
  Trace edited = trace(), assigned = trace();
  edited.read(output(tower.head)).add_(1);
  EXPECT_EQ(edited.read(output(tower.head, 1)).item<float>(), 36);
  EXPECT_TRUE(edited.finish().equal(x * 6));
  assigned.write(output(tower.head), at::zeros({2, 3}));
  EXPECT_EQ(assigned.read(output(tower.head, 1)).item<float>(), 0);
  EXPECT_TRUE(assigned.finish().equal(at::zeros({2, 3})));
}

TEST_F(TowerTest, AListedForwardOffersEveryTensorAndStopsNowhere) {
  std::vector<std::size_t> counts;
  Trace::Options options;
  options.visitor = [&](const Location& location, at::Tensor* const* live, std::size_t count) {
    counts.push_back(count);
    if (&location != &tower.head.output) return;
    EXPECT_TRUE(live[1]->defined());
  };
  Trace listing(tree, forward(true), std::move(options));
  EXPECT_TRUE(listing.finish().equal(x * 5));
  EXPECT_THAT(counts, ElementsAre(2, 1, 1, 1, 1, 1, 2, 1));
}

}  // namespace
}  // namespace vlscope
