#include "core/image_processing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/randint.h"
#include "core/errors.h"

namespace vlscope {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr PixelLimits kQwen3{65536, 16777216};
constexpr PixelLimits kQwen2{3136, 12845056};

ImageOptions small_options() {
  ImageOptions options;
  options.patch_size = 2;
  options.limits = {16, 1024};
  options.image_mean = {0.5, 0.5, 0.5};
  options.image_std = {0.5, 0.5, 0.5};
  return options;
}

at::Tensor noise(int64_t frames, int64_t height, int64_t width) {
  return at::randint(0, 256, {frames, 3, height, width}, at::kByte);
}

// The same arithmetic as whole-tensor operations.
at::Tensor patches_by_permuting(const at::Tensor& frames, const ImageOptions& options) {
  const int64_t depth = options.temporal_patch_size;
  const int64_t patch = options.patch_size;
  const int64_t merge = options.merge_size;
  const int64_t high = frames.size(2) / patch;
  const int64_t wide = frames.size(3) / patch;
  const at::Tensor values = frames.to(at::kFloat).sub(127.5).div(127.5);
  return values.view({-1, depth, 3, high / merge, merge, patch, wide / merge, merge, patch})
      .permute({0, 3, 6, 4, 7, 2, 1, 5, 8})
      .reshape({-1, 3 * depth * patch * patch});
}

at::Tensor patches_of(const at::Tensor& frames, const ImageOptions& options) {
  const int64_t depth = options.temporal_patch_size;
  const int64_t groups = (frames.size(0) + depth - 1) / depth;
  const int64_t area = options.patch_size * options.patch_size;
  at::Tensor out =
      at::empty({groups * frames.size(2) * frames.size(3) / area, 3 * depth * area}, at::kFloat);
  write_patches(frames, options, out);
  return out;
}

TEST(SmartResize, GivesTheSizesOfTheFamilies) {
  EXPECT_EQ(smart_resize({448, 448}, 32, kQwen3), (ImageSize{448, 448}));
  EXPECT_EQ(smart_resize({1080, 1920}, 32, kQwen3), (ImageSize{1088, 1920}));
  EXPECT_EQ(smart_resize({1080, 1920}, 28, kQwen2), (ImageSize{1092, 1932}));
  EXPECT_EQ(smart_resize({5000, 8000}, 32, kQwen3), (ImageSize{3232, 5152}));
  EXPECT_EQ(smart_resize({5000, 8000}, 28, kQwen2), (ImageSize{2828, 4508}));
  EXPECT_EQ(smart_resize({48, 80}, 32, kQwen3), (ImageSize{224, 352}));
  EXPECT_EQ(smart_resize({1, 1}, 32, kQwen3), (ImageSize{256, 256}));
}

TEST(SmartResize, RoundsHalvesToEven) {
  EXPECT_EQ(smart_resize({720, 1280}, 32, kQwen3), (ImageSize{704, 1280}));
  EXPECT_EQ(smart_resize({16, 2048}, 32, kQwen3), (ImageSize{32, 2912}));
  EXPECT_EQ(smart_resize({80, 1024}, 32, kQwen3), (ImageSize{64, 1024}));
}

TEST(SmartResize, KeepsEachSideOfAThinImageAtOneFactor) {
  EXPECT_EQ(smart_resize({31, 639}, 32, {3136, 15680}), (ImageSize{32, 544}));
  EXPECT_EQ(smart_resize({40, 900}, 32, {1024, 8192}), (ImageSize{32, 416}));
}

TEST(SmartResize, AllowsARatioOf200AndRefusesMore) {
  EXPECT_EQ(smart_resize({1, 200}, 32, kQwen3), (ImageSize{32, 3648}));
  EXPECT_EQ(smart_resize({200, 1}, 32, kQwen3), (ImageSize{3648, 32}));
  EXPECT_THAT([] { smart_resize({1, 201}, 32, kQwen3); },
              ThrowsMessage<InputError>(AllOf(HasSubstr("201"), HasSubstr("200"))));
}

TEST(SmartResize, RefusesAnEmptyImage) {
  EXPECT_THROW(smart_resize({0, 5}, 32, kQwen3), InputError);
  EXPECT_THROW(smart_resize({5, 0}, 32, kQwen3), InputError);
}

TEST(CheckImageOptions, RefusesWhatMakesNoSenseWithBothNumbers) {
  ImageOptions options;
  options.limits = {10000, 5000};
  EXPECT_THAT([&] { check_image_options(options); },
              ThrowsMessage<InputError>(AllOf(HasSubstr("10000"), HasSubstr("5000"))));
  options.limits = {0, 5000};
  EXPECT_THROW(check_image_options(options), InputError);
  options = ImageOptions();
  options.merge_size = -1;
  EXPECT_THROW(check_image_options(options), InputError);
  options = ImageOptions();
  options.rescale_factor = 0;
  EXPECT_THROW(check_image_options(options), InputError);
  options = ImageOptions();
  options.image_std[1] = 0;
  EXPECT_THROW(check_image_options(options), InputError);
}

TEST(CheckImageOptions, RefusesWhatWouldOverflow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (int64_t ImageOptions::* setting :
       {&ImageOptions::patch_size, &ImageOptions::merge_size, &ImageOptions::temporal_patch_size}) {
    ImageOptions options;
    options.*setting = kHuge;
    EXPECT_THAT([&] { processed_size({64, 64}, options); },
                ThrowsMessage<InputError>(HasSubstr("9223372036854775807")));
  }
  VideoOptions video;
  video.max_video_tokens = kHuge;
  EXPECT_THROW(processed_video_size(2, {64, 64}, video), InputError);
  EXPECT_THROW(processed_video_size(kHuge, {64, 64}, VideoOptions()), InputError);
  EXPECT_THROW(processed_size({kHuge, kHuge}, ImageOptions()), InputError);
  EXPECT_THROW(smart_resize({64, 64}, kHuge, kQwen3), InputError);
  EXPECT_THROW(smart_resize({64, 64}, 32, {kHuge, kHuge}), InputError);
}

TEST(CheckImageOptions, TakesAnyUpperLimitForNone) {
  ImageOptions options = small_options();
  options.limits.max_pixels = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(processed_size({1000, 3000}, options), (ImageSize{1000, 3000}));
  VideoOptions video;
  video.frames.limits.max_pixels = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(processed_video_size(8, {640, 960}, video), (ImageSize{640, 960}));
}

TEST(WritePatches, OrdersRowsByMergeBlocks) {
  // A 4 x 4 grid of patches of one pixel, each holding its own row-major index.
  ImageOptions options = small_options();
  options.patch_size = 1;
  options.do_normalize = false;
  options.do_rescale = false;
  const at::Tensor frame = at::arange(16, at::kByte).view({1, 1, 4, 4}).expand({1, 3, 4, 4});
  const at::Tensor expected =
      at::arange(16, at::kFloat).view({2, 2, 2, 2}).permute({0, 2, 1, 3}).reshape({16, 1});
  EXPECT_TRUE(at::equal(patches_of(frame, options), expected.expand({16, 6})));
}

TEST(WritePatches, EqualsTheWholeTensorArithmeticOnSeveralFrames) {
  const ImageOptions options = small_options();
  const at::Tensor frames = noise(4, 8, 12);
  EXPECT_TRUE(at::equal(patches_of(frames, options), patches_by_permuting(frames, options)));
}

TEST(WritePatches, RepeatsTheLastFrameToFillATemporalPatch) {
  ImageOptions options = small_options();
  options.temporal_patch_size = 3;
  const at::Tensor frames = noise(4, 8, 4);
  const at::Tensor last = frames.narrow(0, 3, 1);
  EXPECT_TRUE(at::equal(patches_of(frames, options),
                        patches_by_permuting(at::cat({frames, last, last}), options)));
}

TEST(WritePatches, ReadsAnyStrides) {
  const ImageOptions options = small_options();
  const at::Tensor frames = noise(2, 8, 12);
  const at::Tensor expected = patches_of(frames, options);
  EXPECT_TRUE(
      at::equal(patches_of(frames.contiguous(at::MemoryFormat::ChannelsLast), options), expected));
  EXPECT_TRUE(at::equal(patches_of(frames.transpose(2, 3).contiguous().transpose(2, 3), options),
                        expected));
}

TEST(PreprocessImages, TreatsEachImageAsIfAlone) {
  const ImageOptions options = small_options();
  const at::Tensor wide = at::randint(0, 256, {7, 30, 3}, at::kByte);
  const at::Tensor tall = at::randint(0, 256, {50, 9, 3}, at::kByte);
  const Patches both = preprocess_images({wide, tall}, options);
  const Patches first = preprocess_images({wide}, options);
  const Patches second = preprocess_images({tall}, options);
  EXPECT_TRUE(at::equal(both.pixel_values, at::cat({first.pixel_values, second.pixel_values})));
  EXPECT_TRUE(at::equal(both.grid_thw, at::cat({first.grid_thw, second.grid_thw})));
  EXPECT_EQ(both.grid_thw.select(1, 0).sum().item<int64_t>(), 2);
  EXPECT_EQ(both.grid_thw.prod(1).sum().item<int64_t>(), both.pixel_values.size(0));
}

TEST(PreprocessImages, KeepsAConstantImageConstant) {
  const Patches patches = preprocess_images({at::full({1, 1, 3}, 255, at::kByte)}, small_options());
  EXPECT_TRUE(at::equal(patches.pixel_values, at::full(patches.pixel_values.sizes(), 1.0f)));
}

TEST(PreprocessImages, NamesTheImageThatItRefuses) {
  const at::Tensor good = at::full({4, 4, 3}, 1, at::kByte);
  const ImageOptions options = small_options();
  for (const at::Tensor& bad :
       {at::full({4, 4, 3}, 1, at::kFloat), at::full({3, 4, 4}, 1, at::kByte),
        at::full({4, 4}, 1, at::kByte), at::empty({0, 4, 3}, at::kByte)}) {
    EXPECT_THAT([&] { preprocess_images({good, bad}, options); },
                ThrowsMessage<InputError>(HasSubstr("image 1: ")));
  }
}

TEST(PreprocessImages, WithoutResizingRefusesASizeThatDoesNotFit) {
  ImageOptions options = small_options();
  options.do_resize = false;
  EXPECT_THAT([&] { preprocess_images({at::full({8, 6, 3}, 1, at::kByte)}, options); },
              ThrowsMessage<InputError>(AllOf(HasSubstr("multiples of 4"), HasSubstr("6"))));
}

VideoOptions small_video_options() {
  VideoOptions options;
  options.frames = small_options();
  return options;
}

TEST(PreprocessVideos, CutsEachFrameAsAnImageAndFillsTheLastGroupWithItsLastFrame) {
  const VideoOptions options = small_video_options();
  const at::Tensor video = at::randint(256, {5, 8, 8, 3}, at::kByte);
  const Patches patches = preprocess_videos({video}, options);
  const int64_t depth = options.frames.temporal_patch_size;
  const int64_t groups = (5 + depth - 1) / depth;
  EXPECT_EQ(patches.grid_thw[0][0].item<int64_t>(), groups);
  const at::Tensor rows =
      patches.pixel_values.view({groups, -1, 3, depth, patches.pixel_values.size(1) / (3 * depth)});
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t frame = 0; frame < depth; ++frame) {
      const at::Tensor still = video[std::min<int64_t>(group * depth + frame, 4)];
      const at::Tensor alone = preprocess_images({still}, options.frames).pixel_values;
      EXPECT_TRUE(at::equal(rows[group].select(2, frame),
                            alone.view({-1, 3, depth, rows.size(4)}).select(2, 0)));
    }
  }
}

TEST(ProcessedVideoSize, BoundsTheVolumeAndScalesSmallSidesUp) {
  VideoOptions options;
  options.frames.limits = {4096, 131072};
  EXPECT_EQ(processed_video_size(2, {64, 64}, options), (ImageSize{64, 64}));
  EXPECT_EQ(processed_video_size(64, {64, 64}, options), (ImageSize{32, 32}));
  EXPECT_EQ(processed_video_size(2, {8, 16}, options), (ImageSize{32, 64}));
  EXPECT_EQ(processed_video_size(1, {8, 16}, options), processed_video_size(2, {8, 16}, options));
  options.cap_pixels_per_frame = true;
  options.max_video_tokens = 5;
  EXPECT_EQ(processed_video_size(2, {256, 256}, options), (ImageSize{64, 64}));
}

TEST(ProcessedVideoSize, RefusesWhatHasNoSize) {
  const VideoOptions options;
  EXPECT_THROW(processed_video_size(0, {64, 64}, options), InputError);
  EXPECT_THROW(processed_video_size(2, {0, 64}, options), InputError);
  EXPECT_THROW(processed_video_size(2, {1, 201}, options), InputError);
}

}  // namespace
}  // namespace vlscope
