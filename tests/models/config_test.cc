#include "models/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/errors.h"
#include "core/mapped_file.h"
#include "tests/core/checkpoint_files.h"

namespace vlscope {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

/// A small config in the spelling of transformers 4, whose numbers all differ where they may.
json v4() {
  return json::parse(R"({
    "model_type": "qwen3_vl", "torch_dtype": "bfloat16", "tie_word_embeddings": false,
    "image_token_id": 508, "video_token_id": 509,
    "vision_start_token_id": 506, "vision_end_token_id": 507,
    "text_config": {
      "model_type": "qwen3_vl_text", "vocab_size": 512, "hidden_size": 48,
      "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
      "max_position_embeddings": 1024, "rope_theta": 5000000,
      "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2],
                       "mrope_interleaved": true}},
    "vision_config": {
      "model_type": "qwen3_vl", "depth": 4, "hidden_size": 32, "intermediate_size": 64,
      "num_heads": 2, "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2,
      "spatial_merge_size": 2, "out_hidden_size": 48, "num_position_embeddings": 16,
      "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [2, 0]}})");
}

/// The same in the spelling of transformers 5.
json v5() {
  json config = v4();
  json& text = config["text_config"];
  text["rope_parameters"] = text["rope_scaling"];
  text["rope_parameters"]["rope_theta"] = text["rope_theta"];
  text.erase("rope_scaling");
  text.erase("rope_theta");
  config["dtype"] = config["torch_dtype"];
  config.erase("torch_dtype");
  config["vision_config"]["model_type"] = "qwen3_vl_vision";
  config["vision_config"]["rope_parameters"] = {{"rope_theta", 10000.0}, {"rope_type", "axial"}};
  return config;
}

Config parse(const json& config) { return parse_config(config.dump(), "m/config.json"); }

/// The config with the value at a JSON pointer replaced.
json with(const std::string& pointer, const json& value, json config = v4()) {
  config[json::json_pointer(pointer)] = value;
  return config;
}

json without(const std::string& pointer, json config = v4()) {
  const json::json_pointer at(pointer);
  config[at.parent_pointer()].erase(at.back());
  return config;
}

std::string refusal(const json& config) {
  return message_of<ConfigError>([&] { parse(config); });
}

std::string refusal_of_text(const std::string& text) {
  return message_of<ConfigError>([&] { parse_config(text, "m/config.json"); });
}

void expect_same_rope(const RopeConfig& a, const RopeConfig& b) {
  EXPECT_EQ(a.theta, b.theta);
  EXPECT_EQ(a.mrope_section, b.mrope_section);
  EXPECT_EQ(a.mrope_interleaved, b.mrope_interleaved);
}

// ---- What is read -------------------------------------------------------------------------------

TEST(Config, ReadsEveryNumber) {
  const Config config = parse(v4());
  EXPECT_EQ(config.model_type, "qwen3_vl");
  EXPECT_EQ(config.text.model_type, "qwen3_vl_text");
  EXPECT_EQ(config.text.vocab_size, 512);
  EXPECT_EQ(config.text.hidden_size, 48);
  EXPECT_EQ(config.text.intermediate_size, 96);
  EXPECT_EQ(config.text.num_hidden_layers, 5);
  EXPECT_EQ(config.text.num_attention_heads, 4);
  EXPECT_EQ(config.text.num_key_value_heads, 2);
  EXPECT_EQ(config.text.head_dim, 16);
  EXPECT_EQ(config.text.max_position_embeddings, 1024);
  EXPECT_EQ(config.text.rms_norm_eps, 1e-5);
  EXPECT_FALSE(config.text.attention_bias);
  EXPECT_EQ(config.text.rope.theta, 5e6);
  EXPECT_THAT(config.text.rope.mrope_section, ElementsAre(4, 2, 2));
  EXPECT_TRUE(config.text.rope.mrope_interleaved);
  EXPECT_EQ(config.vision.depth, 4);
  EXPECT_EQ(config.vision.hidden_size, 32);
  EXPECT_EQ(config.vision.intermediate_size, 64);
  EXPECT_EQ(config.vision.num_heads, 2);
  EXPECT_EQ(config.vision.head_dim(), 16);
  EXPECT_EQ(config.vision.patch_size, 16);
  EXPECT_EQ(config.vision.temporal_patch_size, 2);
  EXPECT_EQ(config.vision.spatial_merge_size, 2);
  EXPECT_EQ(config.vision.out_hidden_size, 48);
  EXPECT_EQ(config.vision.num_position_embeddings, 16);
  EXPECT_EQ(config.vision.rope_theta, 10000);
  EXPECT_THAT(config.vision.deepstack_visual_indexes, ElementsAre(2, 0));
  EXPECT_EQ(config.image_token_id, 508);
  EXPECT_EQ(config.video_token_id, 509);
  EXPECT_EQ(config.vision_start_token_id, 506);
  EXPECT_EQ(config.vision_end_token_id, 507);
  EXPECT_EQ(config.dtype, c10::kBFloat16);
  EXPECT_THAT(config.notes, IsEmpty());
}

TEST(Config, ReadsBothSpellingsAlike) {
  const Config old_spelling = parse(v4());
  const Config new_spelling = parse(v5());
  expect_same_rope(old_spelling.text.rope, new_spelling.text.rope);
  EXPECT_EQ(old_spelling.dtype, new_spelling.dtype);
  EXPECT_EQ(old_spelling.vision.rope_theta, new_spelling.vision.rope_theta);
}

TEST(Config, TakesTypeForRopeTypeAndMropeForDefault) {
  json config = without("/text_config/rope_scaling/rope_type");
  config["text_config"]["rope_scaling"]["type"] = "mrope";
  expect_same_rope(parse(config).text.rope, parse(v4()).text.rope);
}

TEST(Config, ReadsAnotherBaseOfTheTower) {
  EXPECT_EQ(parse(with("/vision_config/rope_parameters/rope_theta", 500.0, v5())).vision.rope_theta,
            500);
}

TEST(Config, ReadsTheDtypeFromEitherLevel) {
  EXPECT_EQ(parse(without("/torch_dtype")).dtype, std::nullopt);
  EXPECT_EQ(parse(with("/torch_dtype", "torch.float16")).dtype, c10::kHalf);
  EXPECT_EQ(parse(with("/torch_dtype", "auto")).dtype, std::nullopt);
  EXPECT_EQ(parse(with("/text_config/dtype", "float32", without("/torch_dtype"))).dtype,
            c10::kFloat);
}

TEST(Config, LetsTheTopLevelDecideTheTie) {
  EXPECT_FALSE(parse(with("/text_config/tie_word_embeddings", true)).tie_word_embeddings);
  EXPECT_TRUE(parse(with("/tie_word_embeddings", true)).tie_word_embeddings);
  const json silent = without("/tie_word_embeddings");
  EXPECT_FALSE(parse(silent).tie_word_embeddings);
  EXPECT_TRUE(parse(with("/text_config/tie_word_embeddings", true, silent)).tie_word_embeddings);
}

TEST(Config, AcceptsBiasesNoTapsAndUnknownKeys) {
  EXPECT_TRUE(parse(with("/text_config/attention_bias", true)).text.attention_bias);
  EXPECT_THAT(parse(with("/vision_config/deepstack_visual_indexes", json::array()))
                  .vision.deepstack_visual_indexes,
              IsEmpty());
  EXPECT_NO_THROW(parse(with("/text_config/some_new_key", {{"deep", {1, 2}}})));
}

TEST(Config, FillsHarmlessGapsWithTheClassDefaults) {
  json config = v4();
  for (const std::string pointer :
       {"/text_config/rms_norm_eps", "/text_config/hidden_act", "/text_config/model_type",
        "/text_config/max_position_embeddings", "/vision_config/in_channels",
        "/vision_config/hidden_act", "/vision_config/model_type", "/image_token_id",
        "/video_token_id", "/vision_start_token_id", "/vision_end_token_id"}) {
    config = without(pointer, config);
  }
  const Config parsed = parse(config);
  EXPECT_EQ(parsed.text.rms_norm_eps, 1e-6);
  EXPECT_EQ(parsed.text.hidden_act, "silu");
  EXPECT_EQ(parsed.vision.in_channels, 3);
  EXPECT_EQ(parsed.vision.hidden_act, "gelu_pytorch_tanh");
  EXPECT_EQ(parsed.image_token_id, 151655);
  EXPECT_EQ(parsed.video_token_id, 151656);
  EXPECT_EQ(parsed.vision_start_token_id, 151652);
  EXPECT_EQ(parsed.vision_end_token_id, 151653);
}

TEST(Config, AcceptsAByteOrderMark) {
  EXPECT_EQ(parse_config("\xef\xbb\xbf" + v4().dump(), "c").text.hidden_size, 48);
}

// ---- Rotary settings ----------------------------------------------------------------------------

TEST(ConfigRope, FallsBackToTheClassDefaultsWithANoteOnlyWhereTheyFit) {
  json config = without("/text_config/rope_scaling", without("/text_config/rope_theta"));
  EXPECT_THAT(refusal(config), AllOf(HasSubstr("text_config.rope_scaling"),
                                     HasSubstr("[24, 20, 20]"), HasSubstr("head_dim / 2 = 8")));
  config["text_config"]["head_dim"] = 128;
  const Config parsed = parse(config);
  EXPECT_EQ(parsed.text.rope.theta, 5e5);
  EXPECT_THAT(parsed.text.rope.mrope_section, ElementsAre(24, 20, 20));
  EXPECT_THAT(parsed.notes, ElementsAre(HasSubstr("base 500000")));
}

TEST(ConfigRope, NeverInventsABaseForSettingsThatAreThere) {
  EXPECT_THAT(refusal(without("/text_config/rope_theta")),
              HasSubstr("text_config.rope_theta is missing"));
  EXPECT_THAT(refusal(without("/text_config/rope_parameters/rope_theta", v5())),
              HasSubstr("text_config.rope_theta is missing"));
}

TEST(ConfigRope, RefusesTwoAnswers) {
  EXPECT_THAT(refusal(with("/text_config/rope_theta", 10000, v5())),
              AllOf(HasSubstr("10000"), HasSubstr("5000000")));
  EXPECT_THAT(refusal(with("/text_config/rope_scaling", {{"type", "mrope"}}, v5())),
              HasSubstr("both"));
}

TEST(ConfigRope, RefusesKindsThatItDoesNotFollow) {
  EXPECT_THAT(refusal(with("/text_config/rope_scaling/rope_type", "yarn")),
              AllOf(HasSubstr("text_config.rope_scaling.rope_type"), HasSubstr("\"yarn\"")));
  EXPECT_THAT(refusal(with("/text_config/rope_parameters/rope_type", "linear", v5())),
              HasSubstr("\"linear\""));
  EXPECT_THAT(refusal(with("/text_config/rope_scaling/mrope_interleaved", false)),
              HasSubstr("mrope_interleaved"));
  EXPECT_THAT(refusal(with("/text_config/rope_scaling/partial_rotary_factor", 0.25)),
              HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(refusal(with("/vision_config/rope_parameters/rope_type", "yarn", v5())),
              HasSubstr("vision_config.rope_parameters.rope_type"));
}

TEST(ConfigRope, RefusesSectionsThatDoNotSumToHalfTheHead) {
  for (const json& section : {json{4, 2, 3}, json{4, 4}, json{2, 2, 2, 2}, json::array()}) {
    EXPECT_THAT(refusal(with("/text_config/rope_scaling/mrope_section", section)),
                AllOf(HasSubstr("mrope_section"), HasSubstr("head_dim / 2 = 8")));
  }
  EXPECT_THAT(refusal(with("/text_config/rope_scaling/mrope_section", {10, -1, -1})),
              HasSubstr("mrope_section[1]"));
}

// ---- Fields that are wrong ----------------------------------------------------------------------

class WidthField : public ::testing::TestWithParam<std::string> {};

TEST_P(WidthField, IsRefusedWithItsPathWhenMissingOrNotAReasonableNumber) {
  const std::string pointer = GetParam();
  std::string path = pointer.substr(1);
  std::replace(path.begin(), path.end(), '/', '.');
  EXPECT_THAT(refusal(without(pointer)), HasSubstr("m/config.json: " + path + " is missing"));
  EXPECT_THAT(refusal(with(pointer, nullptr)), HasSubstr(path + " is missing"));
  for (const json& value :
       {json(0), json(-4), json(2.5), json("16"), json(true), json{16}, json::object(),
        json(std::numeric_limits<int64_t>::max()), json(std::numeric_limits<int64_t>::min()),
        json(std::numeric_limits<uint64_t>::max()), json(1e300)}) {
    EXPECT_THAT(refusal(with(pointer, value)),
                AllOf(HasSubstr(path), HasSubstr("whole number"), HasSubstr("found ")))
        << value;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, WidthField,
    ::testing::Values("/text_config/vocab_size", "/text_config/hidden_size",
                      "/text_config/intermediate_size", "/text_config/num_hidden_layers",
                      "/text_config/num_attention_heads", "/text_config/num_key_value_heads",
                      "/text_config/head_dim", "/vision_config/depth", "/vision_config/hidden_size",
                      "/vision_config/intermediate_size", "/vision_config/num_heads",
                      "/vision_config/patch_size", "/vision_config/temporal_patch_size",
                      "/vision_config/spatial_merge_size", "/vision_config/out_hidden_size",
                      "/vision_config/num_position_embeddings"));

struct Wrong {
  std::string pointer;
  json value;
  std::string message;
};

void PrintTo(const Wrong& wrong, std::ostream* out) { *out << wrong.pointer << wrong.value; }

class WrongField : public ::testing::TestWithParam<Wrong> {};

TEST_P(WrongField, IsRefusedNamingItAndBothSides) {
  EXPECT_THAT(refusal(with(GetParam().pointer, GetParam().value)), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongField,
    ::testing::Values(
        Wrong{"/text_config/num_key_value_heads", 3,
              "4 is not a multiple of num_key_value_heads 3"},
        Wrong{"/text_config/head_dim", 15, "text_config.head_dim 15 is odd"},
        Wrong{"/text_config/num_hidden_layers", 1025, "from 1 to 1024, found 1025"},
        Wrong{"/vision_config/depth", 1025, "from 1 to 1024, found 1025"},
        Wrong{"/text_config/rms_norm_eps", 0, "must be a positive number, found 0"},
        Wrong{"/text_config/rms_norm_eps", "1e-6", "must be a positive number"},
        Wrong{"/text_config/rope_theta", -1, "text_config.rope_theta must be a positive number"},
        Wrong{"/text_config/hidden_act", "gelu", "must be silu, found \"gelu\""},
        Wrong{"/text_config/attention_bias", 1, "must be true or false, found 1"},
        Wrong{"/text_config/model_type", "qwen3_text", "must be qwen3_vl_text"},
        Wrong{"/text_config", json::array(), "text_config must be an object, found a list of 0"},
        Wrong{"/vision_config", "x", "vision_config must be an object"},
        Wrong{"/vision_config/model_type", "siglip", "qwen3_vl_vision or qwen3_vl"},
        Wrong{"/vision_config/num_heads", 3, "32 is not a multiple of num_heads 3"},
        Wrong{"/vision_config/num_heads", 16, "32 / 16 = 2 is not a multiple of 4"},
        Wrong{"/vision_config/num_position_embeddings", 17, "17 is not a square"},
        Wrong{"/vision_config/hidden_act", "quick_gelu", "found \"quick_gelu\""},
        Wrong{"/vision_config/out_hidden_size", 64, "is 64, but text_config.hidden_size is 48"},
        Wrong{"/vision_config/deepstack_visual_indexes",
              {0, 4},
              "deepstack_visual_indexes[1] is 4, but the tower has 4 blocks"},
        Wrong{"/vision_config/deepstack_visual_indexes", {-1}, "deepstack_visual_indexes[0]"},
        Wrong{"/vision_config/deepstack_visual_indexes",
              {1, 0, 1},
              "deepstack_visual_indexes[2] repeats block 1"},
        Wrong{"/vision_config/deepstack_visual_indexes", 3, "must be a list"},
        Wrong{"/image_token_id", -1, "image_token_id must be a whole number"},
        Wrong{"/image_token_id", 509, "both 509"},
        Wrong{"/tie_word_embeddings", "yes", "tie_word_embeddings must be true or false"},
        Wrong{"/torch_dtype", "float8_e4m3fn", "\"float8_e4m3fn\" is not supported"},
        Wrong{"/quantization_config", {{"quant_method", "fp8"}}, "the method \"fp8\""},
        Wrong{"/text_config/quantization_config", json::object(),
              "text_config.quantization_config"},
        Wrong{"/model_type", 7, "model_type must be a string, found 7"}));

TEST(Config, RefusesOtherFamiliesNamingWhatLoads) {
  for (const std::string family : {"llama", "qwen2", "qwen3", "qwen2_audio"}) {
    EXPECT_THAT(message_of<UnsupportedFamily>([&] { parse(with("/model_type", family)); }),
                AllOf(HasSubstr("m/config.json"), HasSubstr("\"" + family + "\""),
                      HasSubstr("vlscope loads qwen2_vl, qwen2_5_vl, qwen3_vl")));
  }
  EXPECT_THAT(refusal(without("/model_type")), HasSubstr("model_type is missing"));
}

TEST(Config, RefusesTextThatIsNotOneJsonObject) {
  const std::string good = v4().dump();
  EXPECT_THAT(refusal_of_text(""), HasSubstr("m/config.json: not valid JSON"));
  EXPECT_THAT(refusal_of_text(good.substr(0, good.size() / 2)), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal_of_text(good + good), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal_of_text("{\"model_type\": \"\xff\"}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal_of_text("[1]"), HasSubstr("array, not an object"));
  EXPECT_THAT(refusal_of_text(R"({"model_type":"qwen3_vl","model_type":"llama"})"),
              HasSubstr("\"model_type\" appears twice"));
  EXPECT_THAT(refusal_of_text(std::string(1'000'000, '[')), HasSubstr("deeper than 64"));
}

TEST(ReadConfig, SaysWhichPathIsNotThere) {
  const TempFolder folder;
  EXPECT_THAT(message_of<CheckpointNotFound>([&] { read_config(folder.path()); }),
              HasSubstr("config.json"));
  EXPECT_THAT(message_of<CheckpointNotFound>([&] { read_config(folder.path() / "none"); }),
              HasSubstr("none"));
  folder.write("config.json", v4().dump());
  EXPECT_EQ(read_config(folder.path()).text.head_dim, 16);
  EXPECT_THAT(message_of<CheckpointError>([&] { read_config(folder.path() / "config.json"); }),
              HasSubstr("not a folder"));
}

// ---- Mixtures of experts ------------------------------------------------------------------------

json mixture() {
  json config = v4();
  config["model_type"] = "qwen3_vl_moe";
  json& text = config["text_config"];
  text["model_type"] = "qwen3_vl_moe_text";
  text.update(json::parse(R"({"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": false,
                              "moe_intermediate_size": 40})"));
  config["vision_config"]["model_type"] = "qwen3_vl_moe";
  return config;
}

std::vector<bool> sparse_blocks(const json& config) {
  const TextConfig text = parse(config).text;
  std::vector<bool> blocks;
  blocks.reserve(text.num_hidden_layers);
  for (int i = 0; i < text.num_hidden_layers; ++i) blocks.push_back(text.mixture->covers(i));
  return blocks;
}

TEST(MixtureConfig, IsReadUnderBothNamesOfTheNumberOfExperts) {
  EXPECT_FALSE(parse(v4()).text.mixture);
  json renamed = without("/text_config/num_experts", mixture());
  renamed["text_config"]["num_local_experts"] = 6;
  for (const json& config : {mixture(), renamed}) {
    const Config read = parse(config);
    EXPECT_EQ(read.text.mixture->num_experts, 6);
    EXPECT_EQ(read.text.mixture->top_k, 2);
    EXPECT_EQ(read.text.mixture->intermediate_size, 40);
    EXPECT_THAT(text_card(read), ::testing::Contains(Pair("top_k", "2")));
  }
}

TEST(MixtureConfig, SaysWhichBlocksAreDense) {
  EXPECT_THAT(sparse_blocks(mixture()), ElementsAre(true, true, true, true, true));
  const json some = with("/text_config/mlp_only_layers", json{1, 3}, mixture());
  EXPECT_THAT(sparse_blocks(some), ElementsAre(true, false, true, false, true));
  EXPECT_THAT(sparse_blocks(with("/text_config/decoder_sparse_step", 2, mixture())),
              ElementsAre(false, true, false, true, false));
  EXPECT_THAT(sparse_blocks(with("/text_config/decoder_sparse_step", 2, some)),
              ElementsAre(false, false, false, false, false));
}

TEST(MixtureConfig, IsRefusedWhereItDoesNotAddUp) {
  EXPECT_THAT(refusal(with("/text_config/num_experts_per_tok", 7, mixture())),
              HasSubstr("num_experts_per_tok is 7, but there are 6 experts"));
  EXPECT_THAT(refusal(without("/text_config/num_experts", mixture())),
              HasSubstr("text_config.num_experts is missing"));
  EXPECT_THAT(refusal(with("/text_config/moe_intermediate_size", 0, mixture())),
              HasSubstr("text_config.moe_intermediate_size"));
}

// ---- The released sizes -------------------------------------------------------------------------

struct Size {
  std::string name;
  int64_t hidden_size;
  int64_t num_hidden_layers;
  int64_t num_attention_heads;
  bool tied;
  int64_t vision_head_dim;
};

void PrintTo(const Size& size, std::ostream* out) { *out << size.name; }

class ReleasedConfig : public ::testing::TestWithParam<std::tuple<Size, std::string>> {};

TEST_P(ReleasedConfig, IsReadAndShownOnItsCards) {
  const auto& [size, variant] = GetParam();
  const std::string path =
      fmt::format("tests/data/configs/qwen3-vl-{}-{}.json", size.name, variant);
  const auto file = MappedFile::open(path);
  const Config config = parse_config(file->text(), path);
  EXPECT_EQ(config.text.hidden_size, size.hidden_size);
  EXPECT_EQ(config.text.num_hidden_layers, size.num_hidden_layers);
  EXPECT_EQ(config.text.num_attention_heads, size.num_attention_heads);
  EXPECT_EQ(config.text.head_dim, 128);
  EXPECT_EQ(config.text.rope.theta, 5e6);
  EXPECT_EQ(config.vision.head_dim(), size.vision_head_dim);
  EXPECT_EQ(config.tie_word_embeddings, size.tied);
  EXPECT_EQ(config.dtype, c10::kBFloat16);
  EXPECT_THAT(text_card(config), ::testing::Contains(Pair("rope_theta", "5000000")));
  EXPECT_THAT(vision_card(config),
              AllOf(::testing::Contains(Pair("head_dim", fmt::to_string(size.vision_head_dim))),
                    ::testing::Contains(Pair("image_size", "varies"))));
}

INSTANTIATE_TEST_SUITE_P(All, ReleasedConfig,
                         ::testing::Combine(::testing::Values(Size{"2b", 2048, 28, 16, true, 64},
                                                              Size{"4b", 2560, 36, 32, true, 64},
                                                              Size{"8b", 4096, 36, 32, false, 72},
                                                              Size{"32b", 5120, 64, 64, false, 72}),
                                            ::testing::Values("instruct", "thinking")));

}  // namespace
}  // namespace vlscope
