// Configs of Qwen3.5: which block has which mixer, what turns of a head, what is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "core/errors.h"
#include "core/mapped_file.h"
#include "models/config.h"
#include "tests/core/checkpoint_files.h"

namespace vlscope {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr Mixer L = Mixer::kLinearAttention, F = Mixer::kAttention;

json small() {
  return json::parse(R"({
    "model_type": "qwen3_5", "dtype": "bfloat16", "tie_word_embeddings": false,
    "text_config": {
      "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 48,
      "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5,
      "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
      "linear_num_key_heads": 2, "linear_num_value_heads": 6,
      "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1000,
                          "mrope_interleaved": true, "partial_rotary_factor": 0.25}},
    "vision_config": {
      "model_type": "qwen3_5", "depth": 4, "hidden_size": 32, "intermediate_size": 64,
      "num_heads": 2, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
      "out_hidden_size": 48, "num_position_embeddings": 16}})");
}

json with(const std::string& pointer, json value) {
  json config = small();
  config[json::json_pointer(pointer)] = std::move(value);
  return config;
}

Config parse(const json& config) { return parse_config(config.dump(), "config.json"); }

std::string refusal(const json& config) {
  return message_of<ConfigError>([&] { parse(config); });
}

TEST(Qwen3_5Config, EveryFourthBlockIsAttentionUnlessTheFileSaysOtherwise) {
  EXPECT_THAT(parse(small()).text.mixers, ElementsAre(L, L, L, F, L));
  EXPECT_THAT(parse(with("/text_config/full_attention_interval", 2)).text.mixers,
              ElementsAre(L, F, L, F, L));
  const json named = {"full_attention", "linear_attention", "linear_attention", "linear_attention",
                      "full_attention"};
  EXPECT_THAT(parse(with("/text_config/layer_types", named)).text.mixers,
              ElementsAre(F, L, L, L, F));
}

TEST(Qwen3_5Config, TurnsAPartOfEachHead) {
  const TextConfig text = parse(small()).text;
  EXPECT_EQ(text.rope.partial_rotary_factor, 0.25);
  EXPECT_EQ(text.rotary_dim(), 8);
  json beside = small();
  beside["text_config"]["rope_parameters"].erase("partial_rotary_factor");
  EXPECT_EQ(parse(beside).text.rotary_dim(), 8);
  beside["text_config"]["partial_rotary_factor"] = 0.5;
  beside["text_config"]["rope_parameters"]["mrope_section"] = {4, 2, 2};
  EXPECT_EQ(parse(beside).text.rotary_dim(), 16);
}

TEST(Qwen3_5Config, GivesTheSizesOfTheRecurrence) {
  const LinearAttentionConfig linear = parse(small()).text.linear;
  EXPECT_EQ(linear.key_width(), 16);
  EXPECT_EQ(linear.value_width(), 72);
  EXPECT_EQ(linear.channels(), 104);
}

TEST(Qwen3_5Config, HasTokenIdsOfItsOwnAndNoTaps) {
  const Config config = parse(with("/vision_config/deepstack_visual_indexes", json::array()));
  EXPECT_EQ(config.image_token_id, 248056);
  EXPECT_EQ(config.video_token_id, 248057);
  EXPECT_EQ(config.vision_start_token_id, 248053);
  EXPECT_EQ(config.vision_end_token_id, 248054);
  EXPECT_THAT(config.vision.deepstack_visual_indexes, IsEmpty());
}

TEST(Qwen3_5Config, RefusesWhatItDoesNotFollow) {
  EXPECT_THAT(refusal(with("/text_config/layer_types", {"linear_attention"})),
              HasSubstr("text_config.layer_types names 1 blocks, but num_hidden_layers is 5"));
  EXPECT_THAT(refusal(with("/text_config/layer_types", {"sliding_attention"})),
              HasSubstr("layer_types[0] must be linear_attention or full_attention, found "
                        "\"sliding_attention\""));
  EXPECT_THAT(refusal(with("/text_config/layer_types", 3)), HasSubstr("must be a list of strings"));
  EXPECT_THAT(refusal(with("/text_config/linear_num_value_heads", 5)),
              HasSubstr("5 is not a multiple of linear_num_key_heads 2"));
  EXPECT_THAT(refusal(with("/text_config/attn_output_gate", false)),
              HasSubstr("attn_output_gate is false"));
  EXPECT_THAT(refusal(with("/text_config/rope_parameters/mrope_section", {4, 4, 8})),
              HasSubstr("sum to head_dim * partial_rotary_factor / 2 = 4, not 16"));
  EXPECT_THAT(refusal(with("/text_config/rope_parameters/partial_rotary_factor", 1.5)),
              HasSubstr("partial_rotary_factor is 1.5"));
  json silent = small();
  silent["text_config"].erase("linear_conv_kernel_dim");
  EXPECT_THAT(refusal(silent), HasSubstr("text_config.linear_conv_kernel_dim is missing"));
}

struct Size {
  std::string name;
  int64_t hidden_size, num_hidden_layers, value_heads;
  bool tied;
  int64_t vision_head_dim;
};

void PrintTo(const Size& size, std::ostream* out) { *out << size.name; }

class ReleasedQwen3_5 : public ::testing::TestWithParam<Size> {};

TEST_P(ReleasedQwen3_5, IsReadAndShownOnItsCards) {
  const Size& size = GetParam();
  const std::string path = fmt::format("tests/data/configs/qwen3.5-{}.json", size.name);
  const auto file = MappedFile::open(path);
  const Config config = parse_config(file->text(), path);
  const TextConfig& text = config.text;
  EXPECT_EQ(text.hidden_size, size.hidden_size);
  EXPECT_EQ(static_cast<int64_t>(text.mixers.size()), size.num_hidden_layers);
  EXPECT_EQ(std::count(text.mixers.begin(), text.mixers.end(), F), size.num_hidden_layers / 4);
  EXPECT_EQ(text.linear.num_value_heads, size.value_heads);
  EXPECT_EQ(text.linear.key_width(), 2048);
  EXPECT_EQ(text.rotary_dim(), 64);
  EXPECT_EQ(text.rope.theta, 1e7);
  EXPECT_EQ(config.tie_word_embeddings, size.tied);
  EXPECT_EQ(config.vision.head_dim(), size.vision_head_dim);
  EXPECT_THAT(text_card(config),
              AllOf(Contains(Pair("partial_rotary_factor", "0.25")),
                    Contains(Pair("linear_heads", fmt::to_string(size.value_heads)))));
}

INSTANTIATE_TEST_SUITE_P(All, ReleasedQwen3_5,
                         ::testing::Values(Size{"0.8b", 1024, 24, 16, true, 64},
                                           Size{"2b", 2048, 24, 16, true, 64},
                                           Size{"4b", 2560, 32, 32, true, 64},
                                           Size{"9b", 4096, 32, 32, false, 72},
                                           Size{"27b", 5120, 64, 48, false, 72}));

}  // namespace
}  // namespace vlscope
