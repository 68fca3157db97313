#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vlscope {

/// Rotary settings of the text model. `mrope_section` gives the number of frequencies that follow
/// the temporal, height and width position; its three numbers sum to half of the rotated dimensions
/// of a head.
struct RopeConfig {
  double theta;
  std::vector<int64_t> mrope_section;
  bool mrope_interleaved;
  double partial_rotary_factor = 1;  ///< Of each head's dimensions, from the first.
};

/// The mixtures of experts of a text model. A block's MLP is one iff the block is not among
/// `mlp_only_layers` and its number, counted from 1, is a multiple of `sparse_step`.
struct MixtureConfig {
  int64_t num_experts;
  int64_t top_k;
  int64_t intermediate_size;  ///< Of one expert.
  int64_t sparse_step;
  std::vector<int64_t> mlp_only_layers;
  int64_t shared_intermediate_size = 0;  ///< Of the shared expert; 0 where there is none.

  bool covers(int64_t block) const;
};

/// The recurrent blocks of a text model with linear attention.
struct LinearAttentionConfig {
  int64_t conv_kernel;
  int64_t key_head_dim;
  int64_t value_head_dim;
  int64_t num_key_heads;
  int64_t num_value_heads;  ///< A multiple of num_key_heads.

  int64_t key_width() const { return num_key_heads * key_head_dim; }
  int64_t value_width() const { return num_value_heads * value_head_dim; }
  /// Queries, keys and values side by side.
  int64_t channels() const { return 2 * key_width() + value_width(); }
};

/// What stands before the MLP of a text block.
enum class Mixer { kAttention, kLinearAttention };

/// The text model. `head_dim` is a number of its own, not hidden_size / num_attention_heads.
struct TextConfig {
  std::string model_type;
  int64_t vocab_size;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_hidden_layers;
  int64_t num_attention_heads;
  int64_t num_key_value_heads;
  int64_t head_dim;
  int64_t max_position_embeddings;
  double rms_norm_eps;
  bool attention_bias;
  std::string hidden_act;
  RopeConfig rope;
  std::optional<MixtureConfig> mixture;  ///< Absent where every MLP is dense.
  LinearAttentionConfig linear = {};     ///< Zeros where no block is recurrent.
  std::vector<Mixer> mixers = {};        ///< Of each block; empty where all are attention.

  /// How many dimensions of a head are rotated.
  int64_t rotary_dim() const {
    return static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor);
  }
};

/// How the tokens of a video stand in a prompt, and what their time positions are.
enum class VideoTime {
  kByText,    ///< Each frame is a run of its own, behind a text that tells its time.
  kByFrame,   ///< A video is one run, each frame one position later.
  kBySecond,  ///< A video is one run, each frame later by `tokens_per_second` times its seconds.
};

/// How the CPU projects patches of float32: by the reference's convolution, or by the equal matrix
/// product, which is some times as fast and rounds otherwise.
enum class PatchEmbedding { kConvolution, kMatmul };

/// The vision tower. `hidden_size` is its width in every family, whatever the file calls it.
/// `deepstack_visual_indexes` keeps the order of the file: entry k names the block that feeds
/// merger k, and features leave the tower in the order of the blocks. What a family does not know
/// is empty or 0.
struct VisionConfig {
  std::string model_type;
  int64_t depth;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_heads;
  int64_t in_channels;
  int64_t patch_size;
  int64_t temporal_patch_size;
  int64_t spatial_merge_size;
  int64_t out_hidden_size;
  int64_t num_position_embeddings;
  std::string hidden_act;
  double rope_theta;
  std::vector<int64_t> deepstack_visual_indexes;
  int64_t window_size;                         ///< Side of an attention window in pixels.
  std::vector<int64_t> fullatt_block_indexes;  ///< Blocks that attend within a whole frame.
  VideoTime video_time;
  int64_t tokens_per_second;
  /// Chosen by who loads the model, not by the file.
  PatchEmbedding patch_embedding = PatchEmbedding::kConvolution;

  int64_t head_dim() const { return hidden_size / num_heads; }
  /// Side of an attention window in image tokens.
  int64_t window_tokens() const { return window_size / spatial_merge_size / patch_size; }
};

/// One model, as its config.json states it.
struct Config {
  std::string model_type;
  TextConfig text;
  VisionConfig vision;
  int64_t image_token_id;
  int64_t video_token_id;
  int64_t vision_start_token_id;
  int64_t vision_end_token_id;
  bool tie_word_embeddings;
  /// The dtype that the file states; information only, the stored tensors decide (core/weights.h).
  std::optional<c10::ScalarType> dtype;
  /// What a user should be told once: class defaults taken where the file is silent on the rotary
  /// settings.
  std::vector<std::string> notes;
};

/// Reads and validates the text of a config.json, in the spelling of transformers 4 (`rope_theta`,
/// `rope_scaling`, `torch_dtype`) or 5 (`rope_parameters`, `dtype`). Unknown keys are ignored.
///
/// Class defaults stand in for these absent keys only, and only because all released checkpoints
/// agree on them or a wrong one cannot pass unnoticed: `attention_bias` (false; a stored bias is
/// listed as ignored), `rms_norm_eps` (1e-6), both `hidden_act`, `in_channels` (3), the four token
/// ids, `tie_word_embeddings` (text_config's, else false; an absent head is then an error), the
/// tower's `rope_theta` (10000), `max_position_embeddings` (128000, not part of the arithmetic),
/// and `mrope_section`, or the rotary settings as a whole (with a note), where [24, 20, 20] fits
/// `head_dim`. A `rope_theta` missing from rotary settings that are there is an error: the class
/// default (5e5) is not the shipped base (5e6). Of a mixture, `decoder_sparse_step` (1) and
/// `mlp_only_layers` (none) may be absent; `norm_topk_prob` is not read, as the reference
/// renormalises whatever it says. The Qwen2 lines keep the keys of the text model at the top or in
/// a `text_config`; theirs are all required where a default of transformers is not what the
/// released checkpoints have (`rms_norm_eps`, the tower's width, `tokens_per_second`).
///
/// `where` is the path that messages begin with. Raises ConfigError naming the key and what was
/// found, UnsupportedFamily for another `model_type`.
Config parse_config(std::string_view json_text, const std::string& where);

/// Reads `folder`/config.json. Raises CheckpointNotFound where the folder or the file is missing,
/// CheckpointError where `folder` is a file, and whatever parse_config raises.
Config read_config(const std::filesystem::path& folder);

/// The families that parse_config accepts, by `model_type`.
std::vector<std::string> supported_families();

/// Rows of a printed card, in order.
using ConfigCard = std::vector<std::pair<std::string, std::string>>;
ConfigCard text_card(const Config& config);
ConfigCard vision_card(const Config& config);

}  // namespace vlscope
