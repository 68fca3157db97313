#include "core/visual_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/errors.h"

namespace vlscope {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ImageOptions qwen3_options() {
  ImageOptions options;
  options.patch_size = 16;
  options.limits = {65536, 16777216};
  return options;
}

TEST(VisualShape, OfASquareOf512PixelsIsThatOfTheSpecification) {
  const VisualShape shape = image_shape({512, 512}, qwen3_options());
  EXPECT_EQ(shape.resized, (ImageSize{512, 512}));
  EXPECT_EQ(shape.temporal_groups, 1);
  EXPECT_EQ(shape.repeated_frames, 1);
  EXPECT_EQ(shape.grid, (ImageSize{32, 32}));
  EXPECT_EQ(shape.patch_positions, 1024);
  EXPECT_EQ(shape.visual_tokens, 256);
}

TEST(VisualShape, OfThreeFramesHasTwoGroupsOfWhichTheLastRepeatsAFrame) {
  const VisualShape shape = video_shape(3, {512, 512}, qwen3_options());
  EXPECT_EQ(shape.temporal_groups, 2);
  EXPECT_EQ(shape.repeated_frames, 1);
  EXPECT_EQ(shape.patch_positions, 2048);
  EXPECT_EQ(shape.visual_tokens, 512);
  EXPECT_EQ(video_shape(4, {512, 512}, qwen3_options()).repeated_frames, 0);
  EXPECT_EQ(video_shape(4, {512, 512}, qwen3_options()).temporal_groups, 2);
}

TEST(VisualShape, OfAnImageIsResizedAndOfAVideoIsNot) {
  EXPECT_EQ(image_shape({720, 1280}, qwen3_options()).resized, (ImageSize{704, 1280}));
  EXPECT_EQ(image_shape({32, 32}, qwen3_options()).resized, (ImageSize{256, 256}));
  EXPECT_EQ(video_shape(2, {32, 32}, qwen3_options()).resized, (ImageSize{32, 32}));
}

TEST(VisualShape, OfAVideoRefusesSidesThatAreNoMultiples) {
  for (const ImageSize size : {ImageSize{500, 512}, ImageSize{512, 16}, ImageSize{0, 512}}) {
    EXPECT_THAT([&] { video_shape(2, size, qwen3_options()); },
                ThrowsMessage<InputError>(
                    AllOf(HasSubstr("multiples of 32"), HasSubstr(std::to_string(size.height)))));
  }
  EXPECT_THAT([] { video_shape(0, {64, 64}, qwen3_options()); },
              ThrowsMessage<InputError>(HasSubstr("0 frames")));
}

TEST(VisualShape, OfAnImageRefusesARatioOver200) {
  EXPECT_EQ(image_shape({32, 6400}, qwen3_options()).resized, (ImageSize{32, 6400}));
  EXPECT_THROW(image_shape({32, 6401}, qwen3_options()), InputError);
}

TEST(VisualShape, OfTheLargestSizesIsExactAndOfMoreIsRefused) {
  constexpr int64_t kLargest = kLargestSize;
  const VisualShape shape = video_shape(kLargest, {kLargest, kLargest}, qwen3_options());
  EXPECT_EQ(shape.patch_positions, (int64_t{1} << 19) * (int64_t{1} << 32));
  EXPECT_EQ(image_shape({kLargest, kLargest}, qwen3_options()).resized, (ImageSize{4096, 4096}));
  const auto refused = [](const std::string& what) {
    return ThrowsMessage<InputError>(AllOf(HasSubstr(what + " is 1048577"), HasSubstr("1048576")));
  };
  EXPECT_THAT([] { image_shape({kLargest + 1, kLargest}, qwen3_options()); }, refused("height"));
  EXPECT_THAT([] { image_shape({kLargest, kLargest + 1}, qwen3_options()); }, refused("width"));
  EXPECT_THAT([] { video_shape(kLargest + 1, {32, 32}, qwen3_options()); }, refused("frames"));
  EXPECT_THROW(with_token_budget(qwen3_options(), int64_t{1} << 62), InputError);
}

TEST(TokenBudget, BoundsTheTokensOfAnImage) {
  const ImageOptions bounded = with_token_budget(qwen3_options(), 100);
  EXPECT_EQ(bounded.limits.max_pixels, 102400);
  for (int64_t side = 300; side < 3000; side += 77) {
    EXPECT_LE(image_shape({side, 2 * side}, bounded).visual_tokens, 100);
  }
}

TEST(TokenBudget, RefusesLessThanTheSmallestImageHas) {
  EXPECT_EQ(with_token_budget(qwen3_options(), 64).limits.max_pixels, 65536);
  EXPECT_THAT([] { with_token_budget(qwen3_options(), 63); },
              ThrowsMessage<InputError>(AllOf(HasSubstr("63"), HasSubstr("64 tokens or more"))));
}

}  // namespace
}  // namespace vlscope
