// A single row's product, divided among threads, has the bits of the whole.
#include "core/ops/linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace vlscope {
namespace {

class Linear : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the barriers of OpenMP are not seen";
#endif
    before_ = at::get_num_threads();
    at::set_num_threads(GetParam());
  }
  void TearDown() override {
    if (before_ > 0) at::set_num_threads(before_);
  }

 private:
  int before_ = 0;
};

TEST_P(Linear, HasTheBitsOfTorchs) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> shapes{
      {2048, 2048}, {6144, 512}, {1100, 1024}, {151'936, 64}, {64, 64}, {32, 65'536}};
  for (const auto& [out, in] : shapes) {
    const at::Tensor weight = at::randn({out, in}), bias = at::randn({out});
    for (const int rows : {1, 3}) {
      const at::Tensor x = at::randn({1, rows, in});
      EXPECT_TRUE(at::equal(ops::linear(x, weight, {}), at::linear(x, weight)))
          << rows << " x " << in << " to " << out;
      EXPECT_TRUE(at::equal(ops::linear(x, weight, bias), at::linear(x, weight, bias)))
          << rows << " x " << in << " to " << out;
    }
  }
}

TEST_P(Linear, LeavesGraphsAndOtherDtypesToTorch) {
  const at::Tensor weight = at::randn({2048, 1024}), x = at::randn({1, 1, 1024});
  EXPECT_TRUE(ops::linear(x.clone().requires_grad_(), weight, {}).requires_grad());
  const at::Tensor half = x.to(at::kBFloat16), weight_half = weight.to(at::kBFloat16);
  EXPECT_TRUE(at::equal(ops::linear(half, weight_half, {}), at::linear(half, weight_half)));
}

INSTANTIATE_TEST_SUITE_P(Threads, Linear, ::testing::Values(1, 2, 3, 7));

}  // namespace
}  // namespace vlscope
