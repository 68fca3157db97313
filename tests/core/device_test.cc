// What goes to a device in pieces arrives whole.
#include "core/device.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace vlscope {
namespace {

/// Smaller than most of what is sent, so that buffers are used again and again.
constexpr std::int64_t kBufferBytes = 64;

TEST(Uploader, SendsEveryShapeWhole) {
  Uploader upload(at::kCPU, kBufferBytes);
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
           {}, {1}, {16}, {17}, {1000}, {5, 3}, {3, 400}, {0, 4}, {7, 2, 9}}) {
    const at::Tensor source = at::randn(shape);
    EXPECT_TRUE(at::equal(upload(source, at::kFloat), source)) << source.sizes();
  }
}

TEST(Uploader, ConvertsAsTorchDoes) {
  Uploader upload(at::kCPU, kBufferBytes);
  const at::Tensor source = at::randn({33, 5});
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    EXPECT_TRUE(at::equal(upload(source, dtype), source.to(dtype)));
  }
}

TEST(Uploader, TakesAndFillsViews) {
  Uploader upload(at::kCPU, kBufferBytes);
  const at::Tensor source = at::randn({6, 9, 4}).transpose(1, 2), whole = at::zeros({3, 6, 4, 9});
  upload(source, whole[1]);
  EXPECT_TRUE(at::equal(whole[1], source));
  EXPECT_TRUE(at::equal(whole[0], at::zeros({6, 4, 9})));
  EXPECT_TRUE(at::equal(whole[2], at::zeros({6, 4, 9})));
}

TEST(Uploader, LeavesWhatItSentBeforeAlone) {
  Uploader upload(at::kCPU, kBufferBytes);
  const at::Tensor first = at::randn({8}), second = at::randn({8}), third = at::randn({8});
  const at::Tensor sent = upload(first, at::kFloat);
  upload(second, at::kFloat);
  upload(third, at::kFloat);
  EXPECT_TRUE(at::equal(sent, first));
  EXPECT_FALSE(sent.is_alias_of(first));
}

}  // namespace
}  // namespace vlscope
