#include "models/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "core/errors.h"
#include "models/vision/layout.h"
#include "models/vision/windows.h"

namespace vlscope {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kConfig = R"({
  "model_type": "qwen3_vl", "image_token_id": 90, "video_token_id": 91,
  "vision_start_token_id": 92, "vision_end_token_id": 93, "tie_word_embeddings": false,
  "text_config": {
    "model_type": "qwen3_vl_text", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "mrope_section": [4, 2, 2],
                        "mrope_interleaved": true}},
  "vision_config": {
    "model_type": "qwen3_vl_vision", "depth": 4, "hidden_size": 32, "intermediate_size": 64,
    "num_heads": 2, "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "out_hidden_size": 48, "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [0, 2]}
})";

constexpr std::int64_t I = 90;  // The image token.
constexpr std::int64_t V = 91;  // The video token.

Config config() { return parse_config(kConfig, "config.json"); }

at::Tensor longs(const std::vector<std::int64_t>& values) { return at::tensor(values); }

using Grids = std::vector<std::vector<std::int64_t>>;

/// Sets the grids, and pixels of the right size for them.
void give(const Grids& grids, at::Tensor& grid_thw, at::Tensor& pixels) {
  if (grids.empty()) return;
  std::vector<std::int64_t> flat;
  std::int64_t patches = 0;
  for (const auto& grid : grids) {
    flat.insert(flat.end(), grid.begin(), grid.end());
    patches += grid[0] * grid[1] * grid[2];
  }
  grid_thw = longs(flat).view({-1, 3});
  pixels = at::zeros({patches, 3 * 2 * 16 * 16});
}

/// Ids, and the pixels of images and videos.
Inputs prompt(const std::vector<std::int64_t>& ids, const Grids& images = {},
              const Grids& videos = {}) {
  Inputs inputs;
  inputs.input_ids = longs(ids).unsqueeze(0);
  give(images, inputs.image_grid_thw, inputs.pixel_values);
  give(videos, inputs.video_grid_thw, inputs.pixel_values_videos);
  return inputs;
}

std::vector<std::int64_t> axis(const at::Tensor& positions, int axis) {
  const at::Tensor row = positions[axis].reshape(-1).contiguous();
  const auto* data = row.const_data_ptr<std::int64_t>();
  return {data, data + row.numel()};
}

std::string refusal(Inputs inputs) {
  try {
    checked(std::move(inputs), config());
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Positions, TextCountsUpOnAllAxes) {
  const at::Tensor positions = checked(prompt({1, 2, 3}), config()).position_ids;
  for (int i = 0; i < 3; ++i) EXPECT_THAT(axis(positions, i), ElementsAre(0, 1, 2));
}

TEST(Positions, AnImageSpansItsGridAndTheTextGoesOnFromItsLargerSide) {
  const at::Tensor positions =
      checked(prompt({1, 92, I, I, I, I, I, I, I, I, 93, 2}, {{1, 4, 8}}), config()).position_ids;
  EXPECT_THAT(axis(positions, 0), ElementsAre(0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 6, 7));
  EXPECT_THAT(axis(positions, 1), ElementsAre(0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7));
  EXPECT_THAT(axis(positions, 2), ElementsAre(0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7));
}

TEST(Positions, TwoImagesOfTwoSizes) {
  const at::Tensor positions =
      checked(prompt({1, 2, I, I, I, I, 3, 4, I, I, I, 5, 6}, {{1, 4, 4}, {1, 2, 6}}), config())
          .position_ids;
  EXPECT_THAT(axis(positions, 0), ElementsAre(0, 1, 2, 2, 2, 2, 4, 5, 6, 6, 6, 9, 10));
  EXPECT_THAT(axis(positions, 1), ElementsAre(0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 6, 9, 10));
  EXPECT_THAT(axis(positions, 2), ElementsAre(0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10));
}

TEST(Positions, EachFrameOfAVideoIsARunOfItsOwn) {
  const at::Tensor positions =
      checked(prompt({1, 2, 3, V, V, V, V, 1, 2, 3, V, V, V, V, 4, 5}, {}, {{2, 4, 4}}), config())
          .position_ids;
  EXPECT_THAT(axis(positions, 0), ElementsAre(0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 8, 8, 8, 8, 10, 11));
  EXPECT_THAT(axis(positions, 1), ElementsAre(0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 9, 9, 10, 11));
  EXPECT_THAT(axis(positions, 2), ElementsAre(0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9, 8, 9, 10, 11));
}

TEST(Positions, ImagesAndVideosTakeEachTheirOwnGrids) {
  const at::Tensor positions =
      checked(prompt({V, V, 1, I, 2, V, V}, {{1, 2, 2}}, {{2, 2, 4}}), config()).position_ids;
  EXPECT_THAT(axis(positions, 0), ElementsAre(0, 0, 2, 3, 4, 5, 5));
  EXPECT_THAT(axis(positions, 2), ElementsAre(0, 1, 2, 3, 4, 5, 6));
}

TEST(Positions, PaddingIsLeftOutAndHoldsZero) {
  Inputs inputs = prompt({0, 0, 5, 6});
  inputs.attention_mask = longs({0, 0, 1, 1}).unsqueeze(0);
  EXPECT_THAT(axis(checked(inputs, config()).position_ids, 0), ElementsAre(0, 0, 0, 1));
}

TEST(Positions, AHiddenImageTakesNoneAndTheNextHasItsOwnGrid) {
  Inputs inputs = prompt({1, I, I, 2, I, I, 3}, {{1, 2, 4}, {1, 4, 2}});
  inputs.attention_mask = longs({1, 0, 0, 1, 1, 1, 1}).unsqueeze(0);
  const at::Tensor positions = checked(inputs, config()).position_ids;
  EXPECT_THAT(axis(positions, 1), ElementsAre(0, 0, 0, 1, 2, 3, 4));
  EXPECT_THAT(axis(positions, 2), ElementsAre(0, 0, 0, 1, 2, 2, 4));
  inputs.attention_mask = longs({1, 1, 1, 1, 1, 0, 1}).unsqueeze(0);
  EXPECT_THAT(refusal(inputs), HasSubstr("attention_mask is 0 on 1 of the 2 tokens of image 1 at "
                                         "position 4"));
}

TEST(CheckedInputs, TakeNumbersAlone) {
  Inputs inputs = prompt({I}, {{1, 2, 2}});
  inputs.pixel_values[2][7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(refusal(inputs), HasSubstr("pixel_values holds nan at patch 2, column 7"));
  inputs.pixel_values = at::zeros({4, 1536}, at::kMeta);  // As a scan has them.
  EXPECT_THAT(refusal(inputs), HasSubstr("accepted"));
  EXPECT_THROW(check_pixels_hold_data(inputs), InputError);
  inputs.input_ids = inputs.input_ids.to(at::kMeta);
  EXPECT_THAT(refusal(inputs), HasSubstr("input_ids is on meta"));
}

TEST(CheckedInputs, NameWhatDisagreesWithBothNumbers) {
  EXPECT_THAT(refusal(prompt({1, 96})), HasSubstr("holds 96 at row 0, position 1; the vocabulary "
                                                  "has ids 0 to 95"));
  EXPECT_THAT(refusal(prompt({-1})), HasSubstr("holds -1"));
  EXPECT_THAT(refusal(prompt({I, 1})), HasSubstr("1 image tokens"));
  EXPECT_THAT(refusal(prompt({I, I, I}, {{1, 4, 4}})), HasSubstr("3 image tokens"));
  EXPECT_THAT(refusal(prompt({I, I, I}, {{1, 4, 4}})), HasSubstr("give 4 features"));
  EXPECT_THAT(refusal(prompt({I, 1, I, I, I}, {{1, 4, 4}})), HasSubstr("position 0 has 1"));
  EXPECT_THAT(refusal(prompt({I}, {{1, 3, 2}})), HasSubstr("(1, 3, 2)"));
  EXPECT_THAT(refusal({}), HasSubstr("input_ids is missing"));
  Inputs masked = prompt({1, 2});
  masked.attention_mask = longs({0, 0}).unsqueeze(0);
  EXPECT_THAT(refusal(masked), HasSubstr("all 2 positions of row 0"));
  Inputs short_mask = prompt({1, 2});
  short_mask.attention_mask = longs({1}).unsqueeze(0);
  EXPECT_THAT(refusal(short_mask), HasSubstr("[1, 1], input_ids [1, 2]"));
  Inputs gridless = prompt({I}, {{1, 2, 2}});
  gridless.image_grid_thw = at::Tensor();
  EXPECT_THAT(refusal(gridless), HasSubstr("without image_grid_thw"));
  Inputs cut = prompt({I}, {{1, 2, 2}});
  cut.pixel_values = at::zeros({3, 1536});
  EXPECT_THAT(refusal(cut), HasSubstr("has 3 patches, image_grid_thw counts 4"));
}

TEST(CheckedInputs, NameWhatDisagreesInAVideo) {
  EXPECT_THAT(refusal(prompt({V})), HasSubstr("1 video tokens (id 91), the 0 video(s) give 0"));
  EXPECT_THAT(refusal(prompt({V, 1, V}, {}, {{3, 2, 2}})),
              HasSubstr("2 video tokens (id 91), the 1 video(s) give 3 features"));
  EXPECT_THAT(refusal(prompt({V}, {{1, 2, 2}})), HasSubstr("0 image tokens"));
  EXPECT_THAT(refusal(prompt({I}, {}, {{1, 2, 2}})), HasSubstr("1 image tokens"));
  EXPECT_THAT(refusal(prompt({V, V, 1, V, V, V, V}, {}, {{1, 2, 4}, {2, 2, 4}})),
              HasSubstr("accepted"));
  EXPECT_THAT(refusal(prompt({V, V, 1, V, 2, V, V, V}, {}, {{1, 2, 4}, {2, 2, 4}})),
              HasSubstr("frame 0 of video 1 gives 2 features, but the run of video tokens at "
                        "position 3 has 1"));
  EXPECT_THAT(refusal(prompt({V}, {}, {{0, 2, 2}})),
              HasSubstr("video_grid_thw of video 0 is (0, 2, 2) patches; a video has 1 frame or "
                        "more"));
  EXPECT_THAT(refusal(prompt({V}, {}, {{-1, 2, -2}})), HasSubstr("(-1, 2, -2)"));
  EXPECT_THAT(refusal(prompt({V}, {}, {{1, 2, 3}})), HasSubstr("(1, 2, 3)"));
  EXPECT_THAT(refusal(prompt({I, I}, {{2, 2, 2}})), HasSubstr("an image has 1 frame"));
  Inputs gridless = prompt({V}, {}, {{1, 2, 2}});
  gridless.video_grid_thw = at::Tensor();
  EXPECT_THAT(refusal(gridless), HasSubstr("pixel_values_videos was given without video_grid_thw"));
  Inputs pixelless = prompt({V}, {}, {{1, 2, 2}});
  pixelless.pixel_values_videos = at::Tensor();
  EXPECT_THAT(refusal(pixelless),
              HasSubstr("video_grid_thw was given without pixel_values_videos"));
  Inputs cut = prompt({V, V}, {}, {{2, 2, 2}});
  cut.pixel_values_videos = at::zeros({7, 1536});
  EXPECT_THAT(refusal(cut),
              HasSubstr("pixel_values_videos has 7 patches, video_grid_thw counts 8"));
}

TEST(CheckedInputs, RefuseGridsWhosePatchesCountToNoneIn64Bits) {
  // 16 of 2^60 patches: added without care, they are as many as no pixels have.
  const std::int64_t side = 1 << 20;
  const Grids grids(16, {side, side, side});
  Inputs inputs = prompt({1, 2});
  std::vector<std::int64_t> flat;
  for (const auto& grid : grids) flat.insert(flat.end(), grid.begin(), grid.end());
  inputs.video_grid_thw = longs(flat).view({-1, 3});
  inputs.pixel_values_videos = at::zeros({0, 3 * 2 * 16 * 16});
  EXPECT_THAT(refusal(inputs),
              HasSubstr("has 0 patches, video_grid_thw counts 9223372036854775807"));
}

TEST(VisionLayout, PatchesLieInMergeBlockOrder) {
  const VisionLayout layout = vision_layout({{1, 4, 6}}, 2);
  std::vector<std::int64_t> raster;
  const auto rows = layout.coordinates.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < rows.size(0); ++i) raster.push_back(rows[i][0] * 6 + rows[i][1]);
  EXPECT_THAT(raster, ElementsAre(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 18, 19, 14, 15, 20,
                                  21, 16, 17, 22, 23));
}

TEST(VisionLayout, EachFrameIsASegment) {
  const VisionLayout layout = vision_layout({{1, 28, 28}, {2, 4, 6}}, 2);
  const auto* ends = layout.cu_seqlens.const_data_ptr<std::int32_t>();
  EXPECT_THAT(std::vector<int>(ends, ends + 4), ElementsAre(0, 784, 808, 832));
}

std::vector<int> numbers(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.to(at::kInt);
  const auto* first = whole.const_data_ptr<int>();
  return {first, first + whole.numel()};
}

TEST(WindowLayout, FullWindowsFollowEachOther) {
  const WindowLayout windows = window_layout({{1, 16, 16}}, 2, 4);
  EXPECT_THAT(numbers(windows.cu_seqlens), ElementsAre(0, 64, 128, 192, 256));
  const std::vector<int> order = numbers(windows.order);
  EXPECT_THAT(std::vector<int>(order.begin(), order.begin() + 17),
              ElementsAre(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27, 4));
}

TEST(WindowLayout, WindowsAreCutAtTheEdges) {
  const WindowLayout windows = window_layout({{1, 10, 12}}, 2, 4);
  EXPECT_THAT(numbers(windows.order),
              ElementsAre(0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21, 4, 5, 10, 11, 16,
                          17, 22, 23, 24, 25, 26, 27, 28, 29));
  EXPECT_THAT(numbers(windows.cu_seqlens), ElementsAre(0, 64, 96, 112, 120));
}

TEST(WindowLayout, NoWindowCrossesAFrameOrAnImage) {
  const WindowLayout windows = window_layout({{2, 2, 6}, {1, 4, 2}}, 2, 2);
  EXPECT_THAT(numbers(windows.order), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(numbers(windows.cu_seqlens), ElementsAre(0, 8, 12, 20, 24, 32));
}

TEST(WindowLayout, PlacesInvertTheOrder) {
  const WindowLayout windows = window_layout({{2, 6, 10}, {1, 8, 4}}, 2, 2);
  EXPECT_TRUE(at::equal(windows.order.index({windows.places}), at::arange(windows.order.size(0))));
}

TEST(VisionLayout, TheCornersOfAnImageAreTheCornersOfTheTable) {
  const PositionBlend blend = position_blend({{1, 2, 8}}, 2, 4);
  const auto* taps = blend.taps.const_data_ptr<std::int64_t>();
  const auto* weights = blend.weights.const_data_ptr<float>();
  EXPECT_EQ(taps[0], 0);
  EXPECT_EQ(weights[0], 1.0f);
  const std::int64_t last = (blend.taps.size(0) - 1) * 4;
  EXPECT_EQ(taps[last], 15);  // Row 3, column 3 of the table.
  EXPECT_EQ(weights[last], 1.0f);
}

TEST(Model, NumbersEveryLocationOnceAndMarksTheVisualOnes) {
  const auto model = Model::build(config(), Attention::kSdpa);
  const auto& order = model->tree().order();
  for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i]->order(), static_cast<int>(i));
  std::size_t locations = 0;
  for (const Module* module : model->tree().modules()) locations += module->locations().size();
  EXPECT_EQ(order.size(), locations) << "a location is declared and never offered";
  EXPECT_TRUE(std::any_of(order.begin(), order.end(), [](const Location* location) {
    return location->path() == "layers.0.deepstack_output" && location->visual();
  }));
}

TEST(Model, ScansShapesWithoutWeights) {
  const auto model = Model::build(config(), Attention::kEager);
  const auto values = model->scan(prompt({1, I, I, I, I, 2}, {{1, 4, 4}}));
  const auto pattern = std::find_if(values.begin(), values.end(), [](const ScannedValue& value) {
    return value.location->path() == "layers.1.self_attn.attention_probabilities";
  });
  ASSERT_NE(pattern, values.end());
  EXPECT_THAT(pattern->shape, ElementsAre(1, 4, 6, 6));
}

TEST(Model, RefusesToTraceWithoutWeightsAndFamiliesItDoesNotKnow) {
  EXPECT_THROW(Model::build(config(), Attention::kSdpa)->trace(prompt({1})), Error);
  Config other = config();
  other.model_type = "llama";
  EXPECT_THROW(Model::build(other, Attention::kSdpa), UnsupportedFamily);
}

}  // namespace
}  // namespace vlscope
