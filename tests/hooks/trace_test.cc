#include "hooks/trace.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "tests/hooks/message_of.h"

namespace vlscope {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// y = 2 x, as a module.
class Double : public Module {
 public:
  Double(Module* parent, std::string name) : Module(parent, std::move(name), kinds::linear) {}
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const {
    co_await trace.at(input, x);
    if (!trace.skip(*this, x)) x = x * 2;
    co_await trace.at(output, x);
    co_return x;
  }
};

/// Three doublings in a row.
class Chain : public Module {
 public:
  Chain() : Module(nullptr, "", kinds::linear) {}
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const {
    trace.checkpoint();
    co_await trace.at(input, x);
    x = co_await a(trace, std::move(x));
    x = co_await b(trace, std::move(x));
    x = co_await c(trace, std::move(x));
    if (x.size(0) == 7) throw InputError("seven rows");
    co_await trace.at(output, x);
    co_return x;
  }
  Double a{this, "a"}, b{this, "b"}, c{this, "c"};
};

class TraceTest : public ::testing::Test {
 protected:
  TraceTest() : tree(std::make_shared<Tree>(chain)) {
    std::vector<const Location*> visited;
    Trace::Options options;
    options.visitor = [&](const Location& location, at::Tensor* const*, std::size_t) {
      visited.push_back(&location);
    };
    Trace(tree, forward(x), std::move(options)).finish();
    tree->number(visited, visited);
  }

  Trace::Forward forward(const at::Tensor& input) {
    return [this, input](Trace& trace) { return chain(trace, input); };
  }
  Trace trace() { return Trace(tree, forward(x), {}); }
  const Site& output(const Module& module) { return tree->sites()[tree->first_output(module)]; }
  const Site& input(const Module& module) { return tree->sites()[tree->first_input(module)]; }

  Chain chain;
  at::Tensor x = at::ones({2, 3});
  std::shared_ptr<Tree> tree;
};

TEST_F(TraceTest, NumbersTheLocationsInTheOrderOfTheForward) {
  std::vector<std::string> paths;
  for (const Location* location : tree->order()) paths.push_back(location->path());
  EXPECT_THAT(paths, ::testing::ElementsAre("input", "a.input", "a.output", "b.input", "b.output",
                                            "c.input", "c.output", "output"));
}

TEST_F(TraceTest, RefusesAForwardThatVisitsALocationTwice) {
  EXPECT_THROW(Tree(chain).number({&chain.input, &chain.input}, {&chain.input, &chain.input}),
               std::logic_error);
}

TEST_F(TraceTest, ReadingAgainGivesTheSameObjectAndFinishesWithTheSameResult) {
  Trace run = trace();
  const at::Tensor first = run.read(output(chain.a));
  EXPECT_TRUE(run.read(output(chain.a)).is_same(first));
  EXPECT_TRUE(run.finish().equal(x * 8));
}

TEST_F(TraceTest, WhatIsEditedOrAssignedIsWhatTheForwardGoesOnWith) {
  Trace run = trace();
  run.read(output(chain.a)).add_(1);
  run.write(output(chain.b), run.read(output(chain.b)) + 1);
  EXPECT_TRUE(run.finish().equal((x * 2 + 1) * 2 * 2 + 2));
}

TEST_F(TraceTest, RefusesAValueOfAnotherShapeNamingBoth) {
  Trace run = trace();
  EXPECT_THAT(message_of<InputError>([&] { run.write(output(chain.a), at::zeros({2, 4})); }),
              AllOf(HasSubstr("[2, 3] float32"), HasSubstr("[2, 4] float32")));
  EXPECT_TRUE(run.finish().equal(x * 8));
}

TEST_F(TraceTest, APassedValueIsRefusedBeforeTheForwardMoves) {
  Trace run = trace();
  run.read(output(chain.b));
  EXPECT_THAT(message_of<OutOfOrderError>([&] { run.read(output(chain.a)); }),
              AllOf(HasSubstr("a.output"), HasSubstr("b.output")));
  EXPECT_TRUE(run.read(output(chain.c)).equal(x * 8));
}

TEST_F(TraceTest, AnEditIsLateOnlyOnceItsStorageIsNoLongerServed) {
  Trace taken = trace();
  at::Tensor early = taken.read(output(chain.a));
  taken.read(input(chain.b));  // The same storage.
  early.zero_();
  EXPECT_TRUE(taken.finish().equal(at::zeros({2, 3})));

  Trace late = trace();
  early = late.read(output(chain.a));
  late.read(output(chain.b));
  early.zero_();
  EXPECT_THAT(message_of<LateEditError>([&] { late.check_edits(); }), HasSubstr("a.output"));
}

TEST_F(TraceTest, WhatIsSkippedIsNeitherComputedNorReached) {
  Trace run = trace();
  run.replace(chain.b, at::zeros({2, 3}));
  EXPECT_TRUE(run.read(output(chain.b)).equal(at::zeros({2, 3})));
  EXPECT_THAT(message_of<OutOfOrderError>([&] { run.replace(chain.a, x); }), HasSubstr("a "));
}

TEST_F(TraceTest, TheCallersTensorsAreServedAsCopies) {
  Trace::Options options;
  options.foreign = {x};
  Trace run(tree, forward(x), std::move(options));
  run.read(input(chain)).zero_();
  EXPECT_TRUE(run.finish().equal(at::zeros({2, 3})));
  EXPECT_TRUE(x.equal(at::ones({2, 3})));
}

TEST_F(TraceTest, AFailedForwardSaysSoAndStaysFailed) {
  Trace run(tree, forward(at::ones({7, 1})), {});
  EXPECT_TRUE(run.read(output(chain.c)).defined());
  EXPECT_THAT(message_of<InputError>([&] { run.finish(); }), HasSubstr("seven rows"));
  EXPECT_THAT(message_of<OutOfOrderError>([&] { run.read(output(chain)); }), HasSubstr("failed"));
}

TEST_F(TraceTest, ClosingDropsWhatTheForwardHeld) {
  Trace run = trace();
  c10::weak_intrusive_ptr<c10::TensorImpl> held(run.read(output(chain.a)).getIntrusivePtr());
  EXPECT_FALSE(held.expired());
  run.close();
  EXPECT_TRUE(held.expired());
}

TEST_F(TraceTest, TwoTracesRunInLockstep) {
  Trace one = trace(), other = trace();
  for (const Double* module : {&chain.a, &chain.b, &chain.c}) {
    EXPECT_TRUE(one.read(output(*module)).equal(other.read(output(*module))));
  }
}

TEST_F(TraceTest, GradientsPassThroughAServedTensor) {
  Trace run = trace();
  at::Tensor value = run.read(output(chain.a)).requires_grad_();
  run.finish().sum().backward();
  EXPECT_TRUE(value.grad().equal(at::ones({2, 3}) * 4));
}

TEST_F(TraceTest, RefusesAValueOfAnotherDtypeOrDeviceOrNoneNamingBoth) {
  Trace run = trace();
  const auto refusal = [&](at::Tensor value) {
    return message_of<InputError>([&] { run.write(output(chain.a), value); });
  };
  EXPECT_THAT(refusal(x.to(at::kDouble)),
              AllOf(HasSubstr("a.output holds [2, 3] float32 on cpu"), HasSubstr("float64")));
  EXPECT_THAT(refusal(x.to(at::kMeta)), AllOf(HasSubstr("on cpu"), HasSubstr("on meta")));
  EXPECT_THAT(refusal(at::Tensor()), AllOf(HasSubstr("float32 on cpu"), HasSubstr("None")));
  EXPECT_TRUE(run.finish().equal(x * 8));
}

TEST_F(TraceTest, FinishingTwiceGivesTheSameResultAndNothingIsReadBehindTheEnd) {
  Trace run = trace();
  const at::Tensor result = run.finish();
  EXPECT_TRUE(run.finish().is_same(result));
  EXPECT_THAT(message_of<OutOfOrderError>([&] { run.read(output(chain)); }),
              HasSubstr("already stands at its end"));
}

TEST_F(TraceTest, AStoppedTraceKeepsWhatItServedAndServesNoMore) {
  Trace run = trace();
  const at::Tensor value = run.read(output(chain.a));
  EXPECT_TRUE(run.open());
  run.close();
  EXPECT_FALSE(run.open());
  EXPECT_TRUE(value.equal(x * 2));
  EXPECT_THAT(message_of<OutOfOrderError>([&] { run.read(output(chain.b)); }),
              AllOf(HasSubstr("b.output"), HasSubstr("ended")));
  EXPECT_THROW(run.write(output(chain.b), x), OutOfOrderError);
}

TEST_F(TraceTest, WhatTheReaderDropsIsFreedAsTheForwardMovesOn) {
  Trace run = trace();
  const c10::weak_intrusive_ptr<c10::TensorImpl> held(run.read(output(chain.a)).getIntrusivePtr());
  run.read(output(chain.b));
  EXPECT_TRUE(held.expired());
}

TEST_F(TraceTest, ATraceDroppedHalfwayFreesWhatItHeld) {
  auto run = std::make_unique<Trace>(tree, forward(x), Trace::Options{});
  const c10::weak_intrusive_ptr<c10::TensorImpl> held(run->read(output(chain.b)).getIntrusivePtr());
  run.reset();
  EXPECT_TRUE(held.expired());
}

TEST_F(TraceTest, ALateEditIsFoundAtTheNextReadAndAtTheEnd) {
  Trace run = trace();
  const at::Tensor early = run.read(output(chain.a));
  run.read(output(chain.b));
  early[0].fill_(5);  // Through a view of it.
  EXPECT_THAT(message_of<LateEditError>([&] { run.read(output(chain.c)); }),
              AllOf(HasSubstr("a.output was edited"), HasSubstr("moved on to b.output")));
  EXPECT_THROW(run.finish(), LateEditError);

  Trace ended = trace();
  const at::Tensor last = ended.read(output(chain.b));
  ended.finish();
  last.zero_();
  EXPECT_THAT(message_of<LateEditError>([&] { ended.check_edits(); }), HasSubstr("its end"));
}

TEST_F(TraceTest, AnEditOfACopyIsNeverLate) {
  Trace run = trace();
  const at::Tensor copy = run.read(output(chain.a)).clone();
  run.read(output(chain.b));
  copy.zero_();
  EXPECT_TRUE(run.finish().equal(x * 8));
}

TEST_F(TraceTest, EditsInOneTraceDoNotReachAnother) {
  Trace edited = trace(), plain = trace();
  edited.read(output(chain.a)).zero_();
  EXPECT_TRUE(plain.read(output(chain.a)).equal(x * 2));
  edited.write(output(chain.b), at::full_like(x, 3));
  EXPECT_TRUE(plain.read(output(chain.b)).equal(x * 4));
  EXPECT_TRUE(edited.finish().equal(x * 6));
  EXPECT_TRUE(plain.finish().equal(x * 8));
}

TEST_F(TraceTest, RemembersWhereATensorWasServed) {
  Trace run = trace();
  const at::Tensor value = run.read(output(chain.a));
  ASSERT_TRUE(run.site_of(value));
  EXPECT_EQ(run.site_of(value)->path, "a.output");
  EXPECT_EQ(run.position(), "a.output");
  EXPECT_EQ(run.site_of(x + 1), nullptr);
}

TEST_F(TraceTest, InferenceModeReachesNeitherTheForwardNorWhatItServes) {
  const c10::InferenceMode inference;
  Trace run = trace();
  const at::Tensor value = run.read(output(chain.a));
  EXPECT_FALSE(value.is_inference());
  const at::Tensor made_here = value + 1;
  ASSERT_TRUE(made_here.is_inference());
  run.write(output(chain.a), made_here);
  EXPECT_FALSE(run.read(output(chain.a)).is_inference());
  EXPECT_TRUE(run.finish().equal((x * 2 + 1) * 4));
}

TEST_F(TraceTest, AnInterruptEndsTheForward) {
  Trace run = trace();
  Trace::interrupt_check = [] { throw std::runtime_error("interrupted"); };
  EXPECT_THAT(message_of<std::runtime_error>([&] { run.read(output(chain.a)); }), "interrupted");
  Trace::interrupt_check = nullptr;
  EXPECT_THAT(message_of<OutOfOrderError>([&] { run.finish(); }), HasSubstr("failed"));
}

TEST_F(TraceTest, GradientsReachTheCallersTensorThroughItsCopy) {
  const at::Tensor leaf = at::ones({2, 3}).requires_grad_();
  Trace::Options options;
  options.foreign = {leaf};
  Trace run(tree, forward(leaf), std::move(options));
  EXPECT_FALSE(run.read(input(chain)).is_same(leaf));
  run.finish().sum().backward();
  EXPECT_TRUE(leaf.grad().equal(at::ones({2, 3}) * 8));
}

}  // namespace
}  // namespace vlscope
