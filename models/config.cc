#include "models/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>

#include "core/errors.h"
#include "core/mapped_file.h"
#include "core/strict_json.h"

namespace vlscope {
namespace {

using nlohmann::json;

/// What a number in a config may be. The upper ends lie far beyond any model and keep products of
/// three of them inside 64 bits.
struct Range {
  int64_t low;
  int64_t high;
};
constexpr Range kWidth{1, 1 << 20};
constexpr Range kCount{1, 1 << 14};  // heads, patch sides
// Modules and names are made of these before any weight is found missing.
constexpr Range kBlocks{1, 1 << 10};
constexpr Range kExperts{1, 1 << 12};
constexpr Range kVocabulary{1, 1 << 27};
constexpr Range kPositions{1, int64_t{1} << 40};
constexpr Range kTokenId{0, std::numeric_limits<int32_t>::max()};

/// A found value in a message: short, whatever the file holds.
std::string describe(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  std::string text = value.dump();
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  return text;
}

/// One object of the config, with the key path that leads to it. A null counts as absent.
class Section {
 public:
  Section(const json& object, std::string path, const std::string& where)
      : object_(object), path_(std::move(path)), where_(where) {}

  [[noreturn]] void fail(std::string_view key, std::string_view reason) const {
    throw ConfigError(fmt::format("{}: {} {}", where_, key_path(key), reason));
  }

  std::string key_path(std::string_view key) const {
    return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  }

  const std::string& where() const { return where_; }

  bool has(const std::string& key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }

  int64_t integer(const std::string& key, Range range) const {
    return checked_integer(key, value(key), range);
  }

  int64_t integer_or(const std::string& key, Range range, int64_t fallback) const {
    return has(key) ? integer(key, range) : fallback;
  }

  std::vector<int64_t> integers(const std::string& key, Range range) const {
    const json& list = value(key);
    if (!list.is_array()) fail(key, "must be a list of whole numbers, found " + describe(list));
    std::vector<int64_t> numbers;
    for (std::size_t i = 0; i < list.size(); ++i) {
      numbers.push_back(checked_integer(fmt::format("{}[{}]", key, i), list[i], range));
    }
    return numbers;
  }

  double positive(const std::string& key) const {
    const json& number = value(key);
    if (!number.is_number() || !(number.get<double>() > 0)) {
      fail(key, "must be a positive number, found " + describe(number));
    }
    return number.get<double>();
  }

  double positive_or(const std::string& key, double fallback) const {
    return has(key) ? positive(key) : fallback;
  }

  bool flag_or(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    const json& flag = value(key);
    if (!flag.is_boolean()) fail(key, "must be true or false, found " + describe(flag));
    return flag.get<bool>();
  }

  std::vector<std::string> words(const std::string& key) const {
    const json& list = value(key);
    const bool fits = list.is_array() && std::all_of(list.begin(), list.end(),
                                                     [](const json& v) { return v.is_string(); });
    if (!fits) fail(key, "must be a list of strings, found " + describe(list));
    return list.get<std::vector<std::string>>();
  }

  std::string word(const std::string& key) const {
    const json& text = value(key);
    if (!text.is_string()) fail(key, "must be a string, found " + describe(text));
    return text.get<std::string>();
  }

  /// One of `allowed`, the first of which is the value of an absent key.
  std::string choice_or_first(const std::string& key,
                              const std::vector<std::string_view>& allowed) const {
    if (!has(key)) return std::string(allowed.front());
    std::string found = word(key);
    if (std::find(allowed.begin(), allowed.end(), found) == allowed.end()) {
      fail(key, fmt::format("must be {}, found \"{}\"", fmt::join(allowed, " or "), found));
    }
    return found;
  }

  Section section(const std::string& key) const {
    const json& object = value(key);
    if (!object.is_object()) fail(key, "must be an object, found " + describe(object));
    return Section(object, key_path(key), where_);
  }

 private:
  const json& value(const std::string& key) const {
    if (!has(key)) fail(key, "is missing");
    return *object_.find(key);
  }

  int64_t checked_integer(std::string_view key, const json& number, Range range) const {
    const bool whole = number.is_number_integer();
    const bool huge =
        number.is_number_unsigned() && number.get<uint64_t>() > static_cast<uint64_t>(range.high);
    if (!whole || huge || number.get<int64_t>() < range.low || number.get<int64_t>() > range.high) {
      fail(key, fmt::format("must be a whole number from {} to {}, found {}", range.low, range.high,
                            describe(number)));
    }
    return number.get<int64_t>();
  }

  const json& object_;
  std::string path_;
  const std::string& where_;
};

// ---- Parts that families share ------------------------------------------------------------------

/// The class defaults of a family's rotary settings, and whether its axes interleave.
struct RopeDefaults {
  double theta;
  std::vector<int64_t> mrope_section;
  bool interleaved = true;
  double partial_rotary_factor = 1;
};

/// How many of a head's dimensions turn.
int64_t rotated(int64_t head_dim, double partial_rotary_factor) {
  return static_cast<int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
}

void check_mrope_section(const Section& text, const std::string& key, const RopeConfig& rope,
                         int64_t head_dim) {
  const std::vector<int64_t>& section = rope.mrope_section;
  const int64_t sum = std::accumulate(section.begin(), section.end(), int64_t{0});
  const int64_t half = rotated(head_dim, rope.partial_rotary_factor) / 2;
  if (section.size() == 3 && sum == half) return;
  text.fail(key, fmt::format("[{}] must be three numbers that sum to head_dim{} / 2 = {}, not {}",
                             fmt::join(section, ", "),
                             rope.partial_rotary_factor == 1 ? "" : " * partial_rotary_factor",
                             half, sum));
}

/// Refuses settings that would change the angles and that no forward here follows.
void check_rope_kind(const Section& rope, double partial_rotary_factor) {
  for (const char* key : {"rope_type", "type"}) {
    if (!rope.has(key)) continue;
    const std::string type = rope.word(key);
    if (type != "default" && type != "mrope") {
      rope.fail(key, fmt::format("\"{}\" is not supported; default and mrope are", type));
    }
  }
  if (rope.positive_or("partial_rotary_factor", partial_rotary_factor) != partial_rotary_factor) {
    rope.fail("partial_rotary_factor", "other than 1 is not supported in this family");
  }
}

/// The base, which the spelling of v4 keeps beside the rope settings and that of v5 among them.
double read_theta(const Section& text, const Section& rope) {
  if (!rope.has("rope_theta")) return text.positive("rope_theta");
  const double theta = rope.positive("rope_theta");
  if (text.positive_or("rope_theta", theta) != theta) {
    rope.fail("rope_theta", fmt::format("is {}, but {} is {}", theta, text.key_path("rope_theta"),
                                        text.positive("rope_theta")));
  }
  return theta;
}

/// M-RoPE settings, from `rope_parameters` (v5) or `rope_scaling` with `rope_theta` (v4).
RopeConfig read_mrope(const Section& text, int64_t head_dim, const RopeDefaults& defaults,
                      std::vector<std::string>& notes) {
  const bool v5 = text.has("rope_parameters");
  if (v5 && text.has("rope_scaling")) {
    text.fail("rope_scaling", "and rope_parameters are both given; keep one of them");
  }
  const std::string key = v5 ? "rope_parameters" : "rope_scaling";
  RopeConfig config{defaults.theta, defaults.mrope_section, defaults.interleaved,
                    defaults.partial_rotary_factor};
  if (!text.has(key)) {
    check_mrope_section(text, key + ".mrope_section (absent, so by default)", config, head_dim);
    if (text.has("rope_theta")) config.theta = text.positive("rope_theta");
    notes.push_back(fmt::format(
        "{}: {} has no rotary settings: the class defaults stand in, with base {} and sections "
        "[{}]",
        text.where(), text.key_path(key), config.theta, fmt::join(config.mrope_section, ", ")));
    return config;
  }
  const Section rope = text.section(key);
  check_rope_kind(rope, defaults.partial_rotary_factor);
  config.theta = read_theta(text, rope);
  if (rope.has("mrope_section"))
    config.mrope_section = rope.integers("mrope_section", {0, 1 << 20});
  check_mrope_section(rope, "mrope_section", config, head_dim);
  if (rope.flag_or("mrope_interleaved", defaults.interleaved) != defaults.interleaved) {
    rope.fail("mrope_interleaved", defaults.interleaved ? "is false; this family interleaves"
                                                        : "is true; this family does not");
  }
  return config;
}

void check_attention_heads(const Section& text, const TextConfig& config) {
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    text.fail("num_attention_heads",
              fmt::format("{} is not a multiple of num_key_value_heads {}",
                          config.num_attention_heads, config.num_key_value_heads));
  }
  if (config.head_dim % 2 != 0) {
    text.fail("head_dim",
              fmt::format("{} is odd; rotary positions pair its halves", config.head_dim));
  }
}

/// The dense text model of the Qwen3 line, but for its rotary settings.
/// @param width what the file calls the width of the MLP that every token goes through.
TextConfig read_qwen3_text(const Section& text, std::string_view model_type,
                           const std::string& width = "intermediate_size") {
  TextConfig config{};
  config.model_type = text.choice_or_first("model_type", {model_type});
  config.vocab_size = text.integer("vocab_size", kVocabulary);
  config.hidden_size = text.integer("hidden_size", kWidth);
  config.intermediate_size = text.integer(width, kWidth);
  config.num_hidden_layers = text.integer("num_hidden_layers", kBlocks);
  config.num_attention_heads = text.integer("num_attention_heads", kCount);
  config.num_key_value_heads = text.integer("num_key_value_heads", kCount);
  config.head_dim = text.integer("head_dim", kCount);
  config.max_position_embeddings = text.integer_or("max_position_embeddings", kPositions, 128000);
  config.rms_norm_eps = text.positive_or("rms_norm_eps", 1e-6);
  config.attention_bias = text.flag_or("attention_bias", false);
  config.hidden_act = text.choice_or_first("hidden_act", {"silu"});
  check_attention_heads(text, config);
  return config;
}

/// The mixtures of a text model with experts. transformers 5 may write their number as
/// `num_local_experts`.
MixtureConfig read_mixture(const Section& text) {
  MixtureConfig config{};
  const bool renamed = !text.has("num_experts") && text.has("num_local_experts");
  config.num_experts = text.integer(renamed ? "num_local_experts" : "num_experts", kExperts);
  config.top_k = text.integer("num_experts_per_tok", kCount);
  config.intermediate_size = text.integer("moe_intermediate_size", kWidth);
  config.sparse_step = text.integer_or("decoder_sparse_step", kCount, 1);
  if (text.has("mlp_only_layers")) {
    config.mlp_only_layers = text.integers("mlp_only_layers", {0, kCount.high});
  }
  if (config.top_k > config.num_experts) {
    text.fail("num_experts_per_tok",
              fmt::format("is {}, but there are {} experts", config.top_k, config.num_experts));
  }
  return config;
}

/// Refuses blocks of the text model that would see a window of the prompt only.
void check_no_sliding(const Section& text, const TextConfig& config) {
  if (text.flag_or("use_sliding_window", false) && text.has("sliding_window") &&
      text.integer_or("max_window_layers", {0, kCount.high}, 0) < config.num_hidden_layers) {
    text.fail("use_sliding_window",
              "is true for some blocks; attention to the whole prompt alone is supported");
  }
  if (!text.has("layer_types")) return;
  for (const std::string& type : text.words("layer_types")) {
    if (type == "full_attention") continue;
    text.fail("layer_types",
              fmt::format("holds \"{}\"; only \"full_attention\" is supported", type));
  }
}

/// The text model of the Qwen2 lines; `model_types` as in read_qwen2_vision.
TextConfig read_qwen2_text(const Section& text, const std::vector<std::string_view>& model_types) {
  TextConfig config{};
  config.model_type = text.choice_or_first("model_type", model_types);
  config.vocab_size = text.integer("vocab_size", kVocabulary);
  config.hidden_size = text.integer("hidden_size", kWidth);
  config.intermediate_size = text.integer("intermediate_size", kWidth);
  config.num_hidden_layers = text.integer("num_hidden_layers", kBlocks);
  config.num_attention_heads = text.integer("num_attention_heads", kCount);
  config.num_key_value_heads = text.integer("num_key_value_heads", kCount);
  config.max_position_embeddings = text.integer_or("max_position_embeddings", kPositions, 32768);
  config.rms_norm_eps = text.positive("rms_norm_eps");
  config.attention_bias = true;
  config.hidden_act = text.choice_or_first("hidden_act", {"silu"});
  if (config.hidden_size % config.num_attention_heads != 0) {
    text.fail("hidden_size", fmt::format("{} is not a multiple of num_attention_heads {}",
                                         config.hidden_size, config.num_attention_heads));
  }
  config.head_dim = config.hidden_size / config.num_attention_heads;
  if (text.integer_or("head_dim", kCount, config.head_dim) != config.head_dim) {
    text.fail("head_dim", fmt::format("is {}; this family has hidden_size / num_attention_heads = "
                                      "{}",
                                      text.integer("head_dim", kCount), config.head_dim));
  }
  check_attention_heads(text, config);
  check_no_sliding(text, config);
  return config;
}

void check_vision_heads(const Section& vision, const VisionConfig& config) {
  if (config.hidden_size % config.num_heads != 0) {
    vision.fail("hidden_size", fmt::format("{} is not a multiple of num_heads {}",
                                           config.hidden_size, config.num_heads));
  }
  if (config.head_dim() % 4 != 0) {
    vision.fail("hidden_size",
                fmt::format("/ num_heads = {} / {} = {} is not a multiple of 4; two rotary axes "
                            "each pair their halves",
                            config.hidden_size, config.num_heads, config.head_dim()));
  }
}

void check_square(const Section& vision, int64_t positions) {
  const auto side = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(positions))));
  if (side * side != positions) {
    vision.fail("num_position_embeddings",
                fmt::format("{} is not a square; the position table has as many rows as columns",
                            positions));
  }
}

/// A list of blocks of the tower, each named once.
void check_blocks(const Section& vision, const std::string& key, const std::vector<int64_t>& taps,
                  const VisionConfig& config) {
  for (std::size_t i = 0; i < taps.size(); ++i) {
    if (taps[i] >= config.depth) {
      vision.fail(fmt::format("{}[{}]", key, i),
                  fmt::format("is {}, but the tower has {} blocks, 0 to {}", taps[i], config.depth,
                              config.depth - 1));
    }
    if (std::find(taps.begin(), taps.begin() + static_cast<std::ptrdiff_t>(i), taps[i]) !=
        taps.begin() + static_cast<std::ptrdiff_t>(i)) {
      vision.fail(fmt::format("{}[{}]", key, i), fmt::format("repeats block {}", taps[i]));
    }
  }
}

/// The base of the tower's angles. The hub's files leave it out; transformers 5 writes it.
double read_vision_theta(const Section& vision) {
  constexpr double kDefault = 10000;
  if (!vision.has("rope_parameters")) return kDefault;
  const Section rope = vision.section("rope_parameters");
  rope.choice_or_first("rope_type", {"axial", "default"});
  return rope.positive_or("rope_theta", kDefault);
}

/// The tower of the Qwen3 lines, but for DeepStack. `model_types`: the one it has by default, and
/// others that mean the same.
VisionConfig read_qwen3_vision(const Section& vision,
                               const std::vector<std::string_view>& model_types) {
  VisionConfig config{};
  config.model_type = vision.choice_or_first("model_type", model_types);
  config.depth = vision.integer("depth", kBlocks);
  config.hidden_size = vision.integer("hidden_size", kWidth);
  config.intermediate_size = vision.integer("intermediate_size", kWidth);
  config.num_heads = vision.integer("num_heads", kCount);
  config.in_channels = vision.integer_or("in_channels", kCount, 3);
  config.patch_size = vision.integer("patch_size", kCount);
  config.temporal_patch_size = vision.integer("temporal_patch_size", kCount);
  config.spatial_merge_size = vision.integer("spatial_merge_size", {1, 64});
  config.out_hidden_size = vision.integer("out_hidden_size", kWidth);
  config.num_position_embeddings = vision.integer("num_position_embeddings", kWidth);
  config.hidden_act = vision.choice_or_first("hidden_act", {"gelu_pytorch_tanh"});
  config.rope_theta = read_vision_theta(vision);
  check_vision_heads(vision, config);
  check_square(vision, config.num_position_embeddings);
  return config;
}

/// What the towers of the Qwen2 lines have in common. `model_types`: the one that it has by
/// default, and others that mean the same.
VisionConfig read_qwen2_vision(const Section& vision,
                               const std::vector<std::string_view>& model_types) {
  VisionConfig config{};
  config.model_type = vision.choice_or_first("model_type", model_types);
  config.depth = vision.integer_or("depth", kBlocks, 32);
  config.num_heads = vision.integer_or("num_heads", kCount, 16);
  // Files of transformers 4 spell it `in_chans`.
  config.in_channels =
      vision.integer_or("in_channels", kCount, vision.integer_or("in_chans", kCount, 3));
  config.patch_size = vision.integer_or("patch_size", kCount, 14);
  config.temporal_patch_size = vision.integer_or("temporal_patch_size", kCount, 2);
  config.spatial_merge_size = vision.integer_or("spatial_merge_size", {1, 64}, 2);
  config.rope_theta = read_vision_theta(vision);
  return config;
}

/// The tower of Qwen2-VL, whose `hidden_size` is the text model's and whose own is `embed_dim`.
VisionConfig read_qwen2_vl_vision(const Section& vision) {
  VisionConfig config = read_qwen2_vision(vision, {"qwen2_vl_vision", "qwen2_vl"});
  config.hidden_size = vision.integer_or("embed_dim", kWidth, 1280);
  config.intermediate_size = config.hidden_size * vision.integer_or("mlp_ratio", {1, 64}, 4);
  config.out_hidden_size = vision.integer("hidden_size", kWidth);
  config.hidden_act = vision.choice_or_first("hidden_act", {"quick_gelu"});
  config.video_time = VideoTime::kByFrame;
  check_vision_heads(vision, config);
  return config;
}

/// The tower of Qwen2.5-VL.
VisionConfig read_qwen2_5_vl_vision(const Section& vision) {
  VisionConfig config = read_qwen2_vision(vision, {"qwen2_5_vl_vision", "qwen2_5_vl"});
  config.hidden_size = vision.integer("hidden_size", kWidth);
  config.intermediate_size = vision.integer("intermediate_size", kWidth);
  config.out_hidden_size = vision.integer("out_hidden_size", kWidth);
  config.hidden_act = vision.choice_or_first("hidden_act", {"silu"});
  config.window_size = vision.integer_or("window_size", kWidth, 112);
  config.fullatt_block_indexes = vision.integers("fullatt_block_indexes", {0, kCount.high});
  config.video_time = VideoTime::kBySecond;
  config.tokens_per_second = vision.integer("tokens_per_second", kWidth);
  check_vision_heads(vision, config);
  check_blocks(vision, "fullatt_block_indexes", config.fullatt_block_indexes, config);
  if (config.window_tokens() == 0) {
    vision.fail("window_size",
                fmt::format("{} is less than one image token of {} pixels", config.window_size,
                            config.patch_size * config.spatial_merge_size));
  }
  return config;
}

/// `dtype` (v5) or `torch_dtype` (v4), of the whole or of the text model; "torch.bfloat16" as well.
std::optional<c10::ScalarType> read_dtype(const Section& root, const Section& text) {
  for (const Section* section : {&root, &text}) {
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (!section->has(key)) continue;
      std::string name = section->word(key);
      if (name.starts_with("torch.")) name.erase(0, 6);
      if (name == "auto") return std::nullopt;
      if (name == "float32") return c10::kFloat;
      if (name == "bfloat16") return c10::kBFloat16;
      if (name == "float16") return c10::kHalf;
      if (name == "float64") return c10::kDouble;
      section->fail(key, fmt::format("\"{}\" is not supported; float32, bfloat16, float16 and "
                                     "float64 are",
                                     name));
    }
  }
  return std::nullopt;
}

/// The top-level flag decides; transformers 4 kept it with the text model.
bool read_tie(const Section& root, const Section& text) {
  return root.flag_or("tie_word_embeddings", text.flag_or("tie_word_embeddings", false));
}

void refuse_quantisation(const Section& section) {
  if (!section.has("quantization_config")) return;
  const Section quantization = section.section("quantization_config");
  const std::string method =
      quantization.has("quant_method") ? quantization.word("quant_method") : "unnamed";
  section.fail("quantization_config",
               fmt::format("asks for the method \"{}\"; quantised checkpoints are not supported, "
                           "load the unquantised one",
                           method));
}

/// @param key what the tower calls the width of the text model.
void check_projection(const Section& vision, const std::string& key, const Section& text,
                      const Config& config) {
  if (config.vision.out_hidden_size == config.text.hidden_size) return;
  vision.fail(key, fmt::format("is {}, but {} is {}", config.vision.out_hidden_size,
                               text.key_path("hidden_size"), config.text.hidden_size));
}

/// @param first the default of vision_start, from which the others count on.
void read_token_ids(const Section& root, Config& config, int64_t first = 151652) {
  config.image_token_id = root.integer_or("image_token_id", kTokenId, first + 3);
  config.video_token_id = root.integer_or("video_token_id", kTokenId, first + 4);
  config.vision_start_token_id = root.integer_or("vision_start_token_id", kTokenId, first);
  config.vision_end_token_id = root.integer_or("vision_end_token_id", kTokenId, first + 1);
  if (config.image_token_id == config.video_token_id) {
    root.fail("image_token_id",
              fmt::format("and video_token_id are both {}", config.image_token_id));
  }
}

// ---- Families -----------------------------------------------------------------------------------

/// What Qwen3-VL and its mixture of experts have in common; `line` is the `model_type` that the
/// names of their parts begin with.
Config read_qwen3_vl_line(const Section& root, const std::string& line) {
  const Section text = root.section("text_config");
  const Section vision = root.section("vision_config");
  refuse_quantisation(text);
  Config config{};
  config.model_type = root.word("model_type");
  config.text = read_qwen3_text(text, line + "_text");
  config.text.rope = read_mrope(text, config.text.head_dim, {5e5, {24, 20, 20}}, config.notes);
  config.vision = read_qwen3_vision(vision, {line + "_vision", line});
  config.vision.deepstack_visual_indexes =
      vision.integers("deepstack_visual_indexes", {0, kCount.high});
  check_blocks(vision, "deepstack_visual_indexes", config.vision.deepstack_visual_indexes,
               config.vision);
  check_projection(vision, "out_hidden_size", text, config);
  read_token_ids(root, config);
  config.tie_word_embeddings = read_tie(root, text);
  config.dtype = read_dtype(root, text);
  return config;
}

Config read_qwen3_vl(const Section& root) { return read_qwen3_vl_line(root, "qwen3_vl"); }

Config read_qwen3_vl_moe(const Section& root) {
  Config config = read_qwen3_vl_line(root, "qwen3_vl_moe");
  config.text.mixture = read_mixture(root.section("text_config"));
  return config;
}

/// What tells one of the Qwen2 lines from the other.
struct Qwen2Line {
  std::string name;
  std::string projection;  ///< What its tower calls the width of the text model.
  VisionConfig (*read_vision)(const Section& vision);
};

/// The hub's files keep the text model's keys at the top, those of transformers 5 in a section.
Config read_qwen2_line(const Section& root, const Qwen2Line& line) {
  const Section text = root.has("text_config") ? root.section("text_config") : root;
  const Section vision = root.section("vision_config");
  refuse_quantisation(text);
  Config config{};
  config.model_type = line.name;
  const std::string text_name = line.name + "_text";
  config.text = read_qwen2_text(text, {text_name, line.name});
  config.text.rope =
      read_mrope(text, config.text.head_dim, {1e6, {16, 24, 24}, false}, config.notes);
  config.vision = line.read_vision(vision);
  check_projection(vision, line.projection, text, config);
  read_token_ids(root, config);
  // A section that ties wins over a top level that says nothing else than the default.
  config.tie_word_embeddings = read_tie(root, text) || text.flag_or("tie_word_embeddings", false);
  config.dtype = read_dtype(root, text);
  return config;
}

Config read_qwen2_vl(const Section& root) {
  return read_qwen2_line(root, {"qwen2_vl", "hidden_size", read_qwen2_vl_vision});
}

Config read_qwen2_5_vl(const Section& root) {
  return read_qwen2_line(root, {"qwen2_5_vl", "out_hidden_size", read_qwen2_5_vl_vision});
}

/// Which blocks are recurrent: `layer_types`, or every block but each `full_attention_interval`-th.
std::vector<Mixer> read_mixers(const Section& text, int64_t blocks) {
  std::vector<Mixer> mixers;
  if (!text.has("layer_types")) {
    const int64_t interval = text.integer_or("full_attention_interval", kCount, 4);
    for (int64_t i = 1; i <= blocks; ++i) {
      mixers.push_back(i % interval == 0 ? Mixer::kAttention : Mixer::kLinearAttention);
    }
    return mixers;
  }
  const std::vector<std::string> names = text.words("layer_types");
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool linear = names[i] == "linear_attention";
    if (!linear && names[i] != "full_attention") {
      text.fail(fmt::format("layer_types[{}]", i),
                fmt::format("must be linear_attention or full_attention, found \"{}\"", names[i]));
    }
    mixers.push_back(linear ? Mixer::kLinearAttention : Mixer::kAttention);
  }
  if (static_cast<int64_t>(names.size()) != blocks) {
    text.fail("layer_types",
              fmt::format("names {} blocks, but num_hidden_layers is {}", names.size(), blocks));
  }
  return mixers;
}

LinearAttentionConfig read_linear_attention(const Section& text) {
  LinearAttentionConfig config{};
  config.conv_kernel = text.integer("linear_conv_kernel_dim", {1, 1024});
  config.key_head_dim = text.integer("linear_key_head_dim", kCount);
  config.value_head_dim = text.integer("linear_value_head_dim", kCount);
  config.num_key_heads = text.integer("linear_num_key_heads", kCount);
  config.num_value_heads = text.integer("linear_num_value_heads", kCount);
  if (config.num_value_heads % config.num_key_heads != 0) {
    text.fail("linear_num_value_heads",
              fmt::format("{} is not a multiple of linear_num_key_heads {}", config.num_value_heads,
                          config.num_key_heads));
  }
  return config;
}

/// The share of a head's dimensions that turns: among the rotary settings, or beside them.
double read_partial_rotary_factor(const Section& text, int64_t head_dim) {
  double factor = text.positive_or("partial_rotary_factor", 0.25);
  if (text.has("rope_parameters")) {
    factor = text.section("rope_parameters").positive_or("partial_rotary_factor", factor);
  }
  if (factor > 1 || rotated(head_dim, factor) % 2 != 0) {
    text.fail("partial_rotary_factor",
              fmt::format("is {}; it must leave an even number of the {} dimensions of a head",
                          factor, head_dim));
  }
  return factor;
}

/// What Qwen3.5 and its mixture of experts have in common; `line` as in read_qwen3_vl_line.
Config read_qwen3_5_line(const Section& root, const std::string& line, const std::string& width) {
  const Section text = root.section("text_config");
  const Section vision = root.section("vision_config");
  refuse_quantisation(text);
  Config config{};
  config.model_type = root.word("model_type");
  config.text = read_qwen3_text(text, line + "_text", width);
  const double partial = read_partial_rotary_factor(text, config.text.head_dim);
  config.text.rope =
      read_mrope(text, config.text.head_dim, {1e7, {11, 11, 10}, true, partial}, config.notes);
  config.text.mixers = read_mixers(text, config.text.num_hidden_layers);
  config.text.linear = read_linear_attention(text);
  if (!text.flag_or("attn_output_gate", true)) {
    text.fail("attn_output_gate", "is false; the attention of this family has a gate");
  }
  config.vision = read_qwen3_vision(vision, {line + "_vision", line});
  check_projection(vision, "out_hidden_size", text, config);
  read_token_ids(root, config, 248053);
  config.tie_word_embeddings = read_tie(root, text);
  config.dtype = read_dtype(root, text);
  return config;
}

Config read_qwen3_5(const Section& root) {
  return read_qwen3_5_line(root, "qwen3_5", "intermediate_size");
}

Config read_qwen3_5_moe(const Section& root) {
  const std::string shared = "shared_expert_intermediate_size";
  Config config = read_qwen3_5_line(root, "qwen3_5_moe", shared);
  config.text.mixture = read_mixture(root.section("text_config"));
  config.text.mixture->shared_intermediate_size = config.text.intermediate_size;
  return config;
}

struct Family {
  std::string_view model_type;
  Config (*read)(const Section& root);
};
constexpr Family kFamilies[] = {{"qwen2_vl", read_qwen2_vl}, {"qwen2_5_vl", read_qwen2_5_vl},
                                {"qwen3_vl", read_qwen3_vl}, {"qwen3_vl_moe", read_qwen3_vl_moe},
                                {"qwen3_5", read_qwen3_5},   {"qwen3_5_moe", read_qwen3_5_moe}};

json parse_text(std::string_view text, const std::string& where) {
  try {
    return parse_json_object(text);
  } catch (const JsonError& error) {
    throw ConfigError(fmt::format("{}: {}", where, error.what()));
  }
}

}  // namespace

bool MixtureConfig::covers(int64_t block) const {
  const bool dense =
      std::find(mlp_only_layers.begin(), mlp_only_layers.end(), block) != mlp_only_layers.end();
  return !dense && (block + 1) % sparse_step == 0;
}

std::vector<std::string> supported_families() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.model_type);
  return names;
}

Config parse_config(std::string_view json_text, const std::string& where) {
  const json object = parse_text(json_text, where);
  const Section root(object, "", where);
  const std::string model_type = root.word("model_type");
  for (const Family& family : kFamilies) {
    if (family.model_type != model_type) continue;
    refuse_quantisation(root);
    return family.read(root);
  }
  throw UnsupportedFamily(fmt::format("{}: model_type \"{}\" is not supported; vlscope loads {}",
                                      where, model_type, fmt::join(supported_families(), ", ")));
}

Config read_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = require_folder(folder) / "config.json";
  const auto file = MappedFile::open(path);
  return parse_config(file->text(), path.string());
}

ConfigCard text_card(const Config& config) {
  const TextConfig& text = config.text;
  const auto number = [](int64_t value) { return fmt::to_string(value); };
  ConfigCard card = {
      {"model_type", config.model_type},
      {"num_layers", number(text.num_hidden_layers)},
      {"hidden_size", number(text.hidden_size)},
      {"num_heads", number(text.num_attention_heads)},
      {"num_key_value_heads", number(text.num_key_value_heads)},
      {"head_dim", number(text.head_dim)},
      {"intermediate_size", number(text.intermediate_size)},
      {"vocab_size", number(text.vocab_size)},
      {"max_position_embeddings", number(text.max_position_embeddings)},
      {"rms_norm_eps", fmt::to_string(text.rms_norm_eps)},
      {"hidden_act", text.hidden_act},
      {"rope_theta", fmt::to_string(text.rope.theta)},
      {"mrope_section", fmt::format("[{}]", fmt::join(text.rope.mrope_section, ", "))},
      {"tie_word_embeddings", config.tie_word_embeddings ? "true" : "false"}};
  if (const auto& mixture = text.mixture) {
    card.insert(card.end(), {{"num_experts", number(mixture->num_experts)},
                             {"top_k", number(mixture->top_k)},
                             {"moe_intermediate_size", number(mixture->intermediate_size)}});
  }
  if (!text.mixers.empty()) {
    const LinearAttentionConfig& linear = text.linear;
    std::vector<std::size_t> full;
    for (std::size_t k = 0; k < text.mixers.size(); ++k) {
      if (text.mixers[k] == Mixer::kAttention) full.push_back(k);
    }
    card.insert(card.end(),
                {{"partial_rotary_factor", fmt::to_string(text.rope.partial_rotary_factor)},
                 {"full_attention_layers", fmt::format("[{}]", fmt::join(full, ", "))},
                 {"linear_heads", number(linear.num_value_heads)},
                 {"linear_key_heads", number(linear.num_key_heads)},
                 {"linear_key_dim", number(linear.key_head_dim)},
                 {"linear_value_dim", number(linear.value_head_dim)},
                 {"linear_conv_kernel_dim", number(linear.conv_kernel)}});
  }
  return card;
}

ConfigCard vision_card(const Config& config) {
  const VisionConfig& vision = config.vision;
  const auto number = [](int64_t value) { return fmt::to_string(value); };
  const auto blocks = [](const std::vector<int64_t>& list) {
    return list.empty() ? "none" : fmt::format("[{}]", fmt::join(list, ", "));
  };
  return {{"num_layers", number(vision.depth)},
          {"width", number(vision.hidden_size)},
          {"num_heads", number(vision.num_heads)},
          {"head_dim", number(vision.head_dim())},
          {"intermediate_size", number(vision.intermediate_size)},
          {"patch_size", number(vision.patch_size)},
          {"image_size", "varies"},
          {"spatial_merge_size", number(vision.spatial_merge_size)},
          {"window_size", vision.window_size > 0 ? number(vision.window_size) : "none"},
          {"fullatt_block_indexes", blocks(vision.fullatt_block_indexes)},
          {"deepstack_visual_indexes", blocks(vision.deepstack_visual_indexes)}};
}

}  // namespace vlscope
