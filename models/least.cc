#include "models/least.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace vlscope {
namespace {

constexpr std::int64_t kWidth = 8;
constexpr std::int64_t kText = 0, kImage = 1, kVideo = 2, kStart = 3, kEnd = 4, kVocabulary = 5;

/// Three frequencies, one for each axis of a position, and as many dimensions left as it is if only
/// a part of each head is rotated.
void shrink_rotary(TextConfig& text) {
  RopeConfig& rope = text.rope;
  rope.mrope_section = {1, 1, 1};
  if (rope.partial_rotary_factor != 1) rope.partial_rotary_factor = 0.5;
  text.head_dim = rope.partial_rotary_factor == 1 ? 6 : 12;
}

void shrink(TextConfig& text) {
  text.vocab_size = kVocabulary;
  text.hidden_size = text.intermediate_size = kWidth;
  text.num_attention_heads = text.num_key_value_heads = 1;
  shrink_rotary(text);
  if (auto& mixture = text.mixture) {
    mixture->num_experts = mixture->top_k = 1;
    mixture->intermediate_size = kWidth;
    if (mixture->shared_intermediate_size > 0) mixture->shared_intermediate_size = kWidth;
  }
  LinearAttentionConfig& linear = text.linear;
  linear.key_head_dim = linear.value_head_dim = kWidth;
  linear.num_key_heads = linear.num_value_heads = 1;
}

void shrink(VisionConfig& vision) {
  vision.hidden_size = vision.intermediate_size = vision.out_hidden_size = kWidth;
  vision.num_heads = vision.in_channels = vision.patch_size = 1;
  vision.window_size = vision.spatial_merge_size;  // One token.
  if (vision.num_position_embeddings > 0) vision.num_position_embeddings = 4;
}

}  // namespace

Config least_config(Config config) {
  shrink(config.text);
  shrink(config.vision);
  config.image_token_id = kImage;
  config.video_token_id = kVideo;
  config.vision_start_token_id = kStart;
  config.vision_end_token_id = kEnd;
  return config;
}

Inputs least_inputs(const Config& config, bool with_image) {
  Inputs inputs;
  std::vector<std::int64_t> ids{kText};
  if (with_image) {
    const VisionConfig& vision = config.vision;
    const std::int64_t side = vision.spatial_merge_size;
    ids.push_back(config.image_token_id);
    inputs.image_grid_thw = at::tensor(std::vector<std::int64_t>{1, side, side}).unsqueeze(0);
    inputs.pixel_values = at::zeros({side * side, vision.in_channels * vision.temporal_patch_size *
                                                      vision.patch_size * vision.patch_size},
                                    at::kFloat);
  }
  inputs.input_ids = at::tensor(ids).unsqueeze(0);
  return inputs;
}

}  // namespace vlscope
