#include "core/flow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <coroutine>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace vlscope {
namespace {

static_assert(!std::is_copy_constructible_v<Flow<int>>);
static_assert(std::is_nothrow_move_constructible_v<Flow<int>>);

/// Suspends the whole chain and leaves the handle of the call that did.
struct Pause {
  std::coroutine_handle<>& innermost;
  bool await_ready() const noexcept { return false; }
  void await_suspend(std::coroutine_handle<> caller) noexcept { innermost = caller; }
  void await_resume() const noexcept {}
};

/// Counts the ends of lives.
class Mortal {
 public:
  explicit Mortal(int& deaths) : deaths_(deaths) {}
  Mortal(const Mortal&) = delete;
  ~Mortal() { ++deaths_; }

 private:
  int& deaths_;
};

template <class T>
T run(Flow<T> flow) {
  flow.handle().resume();
  return flow.result();
}

Flow<int> just(int value) { co_return value; }

Flow<int> sum(int a, int b) {
  const int first = co_await just(a);
  co_return first + co_await just(b);
}

Flow<int> sum_of_sums() { co_return co_await sum(1, 2) + co_await sum(3, 4); }

TEST(Flow, AwaitsNestInsideExpressions) { EXPECT_EQ(run(sum_of_sums()), 10); }

TEST(Flow, NothingRunsBeforeItIsResumedOrAwaited) {
  bool started = false;
  const auto start = [](bool& flag) -> Flow<int> {
    flag = true;
    co_return 1;
  };
  Flow<int> flow = start(started);
  EXPECT_FALSE(started);
  EXPECT_FALSE(flow.done());
  flow.handle().resume();
  EXPECT_TRUE(started);
  EXPECT_TRUE(flow.done());
}

TEST(Flow, AnEmptyFlowIsNotDone) { EXPECT_FALSE(Flow<int>().done()); }

Flow<std::unique_ptr<int>> box(std::unique_ptr<int> value) { co_return std::move(value); }

Flow<std::unique_ptr<int>> box_twice(std::unique_ptr<int> value) {
  std::unique_ptr<int> boxed = co_await box(std::move(value));
  co_return co_await box(std::move(boxed));
}

TEST(Flow, ArgumentsAndResultsPassByMove) {
  auto value = std::make_unique<int>(7);
  const int* address = value.get();
  EXPECT_EQ(run(box_twice(std::move(value))).get(), address);
}

TEST(Flow, AMovedFlowIsRunByItsNewOwner) {
  Flow<int> first = just(3);
  Flow<int> second = std::move(first);
  EXPECT_FALSE(first.handle());
  EXPECT_EQ(run(std::move(second)), 3);
}

Flow<int> fail(int& deaths) {
  const Mortal local(deaths);
  throw std::runtime_error("from the third level");
  co_return 0;
}
Flow<int> call_fail(int& deaths) {
  const Mortal local(deaths);
  co_return co_await fail(deaths) + 1;
}
Flow<int> call_call_fail(int& deaths) {
  const Mortal local(deaths);
  co_return co_await call_fail(deaths) + 1;
}

TEST(Flow, AnExceptionCrossesThreeLevelsAndDestroysTheirLocals) {
  int deaths = 0;
  Flow<int> flow = call_call_fail(deaths);
  flow.handle().resume();
  EXPECT_TRUE(flow.done());
  EXPECT_EQ(deaths, 3);
  try {
    flow.result();
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "from the third level");
  }
}

Flow<std::string> recover(int& deaths) {
  std::string caught;
  try {
    co_await call_fail(deaths);
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  co_return caught + ", " + std::to_string(co_await just(5));
}

TEST(Flow, ACallerMayCatchAndGoOnAwaiting) {
  int deaths = 0;
  EXPECT_EQ(run(recover(deaths)), "from the third level, 5");
  EXPECT_EQ(deaths, 2);
}

/// Lowest and highest address of a local on the thread's stack.
struct StackRange {
  std::uintptr_t low = UINTPTR_MAX, high = 0;
  std::uintptr_t span() const { return high - low; }
};

[[gnu::noinline]] void mark(StackRange& range) {
  volatile char local = 0;
  const auto here = reinterpret_cast<std::uintptr_t>(&local);
  range.low = std::min(range.low, here);
  range.high = std::max(range.high, here);
}

Flow<int> marked(StackRange& range) {
  mark(range);
  co_return 1;
}

Flow<int> count_to(int n, StackRange& range) {
  int count = 0;
  while (count < n) {
    count += co_await marked(range);
    mark(range);
  }
  co_return count;
}

Flow<int> nest(int depth, StackRange& range) {
  mark(range);
  if (depth == 0) co_return 0;
  const int below = co_await nest(depth - 1, range);
  mark(range);
  co_return below + 1;
}

// g++ transfers by a tail call, which it makes in optimized builds without a sanitizer only; the
// others run a shorter chain on the stack that they have.
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__)
constexpr int kMany = 100'000;
constexpr std::uintptr_t kStackLimit = 4096;
#else
constexpr int kMany = 1'000;
constexpr std::uintptr_t kStackLimit = UINTPTR_MAX;
#endif

TEST(Flow, ManySequentialAwaitsUseNoStack) {
  StackRange range;
  EXPECT_EQ(run(count_to(kMany, range)), kMany);
  EXPECT_LT(range.span(), kStackLimit);
}

TEST(Flow, ManyNestedAwaitsUseNoStack) {
  StackRange range;
  EXPECT_EQ(run(nest(kMany, range)), kMany);
  EXPECT_LT(range.span(), kStackLimit);
}

struct Journal {
  std::coroutine_handle<> innermost;
  std::vector<std::string> lines;
  int deaths = 0;
};

Flow<int> inner(Journal& journal) {
  const Mortal local(journal.deaths);
  journal.lines.push_back("inner before");
  co_await Pause{journal.innermost};
  journal.lines.push_back("inner after");
  co_return 1;
}
Flow<int> middle(Journal& journal) {
  const Mortal local(journal.deaths);
  journal.lines.push_back("middle before");
  const int value = co_await inner(journal);
  journal.lines.push_back("middle after");
  co_return value + 1;
}
Flow<int> outer(Journal& journal) {
  const Mortal local(journal.deaths);
  const int value = co_await middle(journal);
  journal.lines.push_back("outer after");
  co_return value + 1;
}

TEST(Flow, SuspendedInANestedCallItResumesAtTheInnermost) {
  Journal journal;
  Flow<int> flow = outer(journal);
  flow.handle().resume();
  EXPECT_FALSE(flow.done());
  EXPECT_EQ(journal.lines, (std::vector<std::string>{"middle before", "inner before"}));
  EXPECT_NE(journal.innermost.address(), flow.handle().address());

  journal.lines.clear();
  journal.innermost.resume();
  EXPECT_EQ(journal.lines,
            (std::vector<std::string>{"inner after", "middle after", "outer after"}));
  ASSERT_TRUE(flow.done());
  EXPECT_EQ(flow.result(), 3);
  EXPECT_EQ(journal.deaths, 3);
}

TEST(Flow, AbandonedWhileSuspendedItDestroysTheLocalsOfEveryLevelOnce) {
  Journal journal;
  {
    Flow<int> flow = outer(journal);
    flow.handle().resume();
    EXPECT_EQ(journal.deaths, 0);
  }
  EXPECT_EQ(journal.deaths, 3);
}

TEST(Flow, AbandonedByAssignmentItDestroysTheLocalsAtOnce) {
  Journal journal;
  Flow<int> flow = outer(journal);
  flow.handle().resume();
  flow = {};
  EXPECT_EQ(journal.deaths, 3);
}

Flow<int> hold(std::shared_ptr<int> argument) { co_return *argument; }

TEST(Flow, NeverStartedItReleasesItsArguments) {
  const auto argument = std::make_shared<int>(1);
  {
    const Flow<int> flow = hold(argument);
    EXPECT_EQ(argument.use_count(), 2);
  }
  EXPECT_EQ(argument.use_count(), 1);
}

TEST(Flow, TwoSuspendedChainsAdvanceIndependently) {
  Journal one, other;
  Flow<int> first = outer(one), second = outer(other);
  first.handle().resume();
  second.handle().resume();
  other.innermost.resume();
  EXPECT_TRUE(second.done());
  EXPECT_FALSE(first.done());
  one.innermost.resume();
  EXPECT_TRUE(first.done());
}

}  // namespace
}  // namespace vlscope
