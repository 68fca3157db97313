// Qwen3-VL, the dense line: 2B to 32B, Instruct and Thinking. arXiv:2511.21631.
#pragma once

#include <memory>
#include <vector>

#include "models/causal_lm.h"
#include "models/text/decoder.h"
#include "models/vision/tower.h"

namespace vlscope {

/// patches = patch_embed(pixels) + resampled pos_embed; blocks; after each tapped block its
/// DeepStack merger; the projector last.
class Qwen3VLVision : public Module {
 public:
  Qwen3VLVision(Module* parent, std::string name, const VisionConfig& config, bool eager);
  Flow<VisionFeatures> operator()(Trace& trace, at::Tensor pixels, at::Tensor grid_thw) const;

  PatchEmbed patch_embed;
  Embedding pos_embed;
  VisionRotary rotary_pos_emb;
  std::vector<std::unique_ptr<VisionLayer>> blocks;
  Merger merger;
  std::vector<std::unique_ptr<Merger>> deepstack_merger_list;

  Location image_token_mask{this, "image_token_mask"};  ///< of images, of videos, of both
  Location image_features{this, "image_features"};      ///< of images, of videos

 private:
  Flow<at::Tensor> embed(Trace& trace, at::Tensor pixels, const VisionLayout& layout) const;
  const Merger* tap_after(std::size_t block) const;

  std::vector<std::int64_t> taps_;
  std::int64_t merge_, table_side_;
};

/// The text blocks; after block k, DeepStack level k is added at the image and video tokens.
class Qwen3VLText : public Module {
 public:
  struct Input {
    at::Tensor inputs_embeds;     ///< `[batch, seq, hidden]`
    at::Tensor attention_mask;    ///< `[batch, past + seq]`
    at::Tensor position_ids;      ///< `[3, batch, seq]`
    at::Tensor visual_pos_masks;  ///< `[batch, seq]` bool, or undefined
    at::Tensor visual_rows;       ///< The same as indices into `[batch * seq]`
    std::vector<at::Tensor> deepstack;
    Replay replay = {};
    KeyValueCache* cache = nullptr;  ///< Of a generation
  };
  Qwen3VLText(Module* parent, std::string name, const TextConfig& config, std::size_t levels,
              Attention attention);
  Flow<at::Tensor> operator()(Trace& trace, Input in) const;

  Embedding embed_tokens;
  std::vector<std::unique_ptr<TextLayer>> layers;
  RmsNorm norm;
  TextRotary rotary_emb;
  std::vector<std::unique_ptr<Location>> deepstack_outputs;  ///< On the first layers, one a level.

 private:
  at::Tensor mask(const Input& in) const;
  const Location& end_of(std::size_t block, const Input& in) const;
  bool eager_;
};

class Qwen3VLModel : public Module {
 public:
  Qwen3VLModel(Module* parent, std::string name, const Config& config, Attention attention);

  Qwen3VLVision visual;
  Qwen3VLText language_model;
};

class Qwen3VL : public CausalLM {
 public:
  Qwen3VL(const Config& config, Attention attention);

  Qwen3VLModel model;

 protected:
  Flow<at::Tensor> hidden_states(Trace& trace, Inputs& inputs) const override;
  const RmsNorm& final_norm() const override { return model.language_model.norm; }

 private:
  /// Runs the tower on images and videos, scatters its features among the embeddings of `in`, and
  /// puts the DeepStack levels there.
  Flow<Qwen3VLText::Input> see(Trace& trace, const Inputs& inputs, Qwen3VLText::Input in) const;
};

}  // namespace vlscope
