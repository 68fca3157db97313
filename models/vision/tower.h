// The parts of the vision tower.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/clone.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/ops/precision.h"
#include "models/config.h"
#include "models/layers.h"
#include "models/recording.h"
#include "models/vision/layout.h"

namespace vlscope {

/// A tower: pixels `[patches, channels * frames * side * side]` and their grids to what the text
/// model takes.
class VisionTower : public Module {
 public:
  VisionTower(Module* parent, std::string name) : Module(parent, std::move(name), kinds::vision) {}
  virtual Flow<VisionFeatures> operator()(Trace& trace, at::Tensor pixels,
                                          at::Tensor grid_thw) const = 0;
  /// How many sets of features go to the text model besides the merged patches; nullopt in a family
  /// that knows no such sets.
  virtual std::optional<std::size_t> deepstack_levels() const { return std::nullopt; }

  Location image_token_mask{this, "image_token_mask"};  ///< of images, of videos, of both
  Location image_features{this, "image_features"};      ///< of images, of videos
};

/// The norms of a tower, whatever its config says.
inline constexpr double kVisionNormEps = 1e-6;

/// Patches that become one image token.
inline std::int64_t block_area(const VisionConfig& config) {
  return config.spatial_merge_size * config.spatial_merge_size;
}

/// A stream that has been read and will be offered again. A graph keeps what its operations have
/// read, so an edit from here on goes to a tensor of its own.
inline at::Tensor beyond_its_reader(const at::Tensor& x) { return ops::apart_from_graph(x); }

/// What every block of the tower reads besides the stream. Cheap to copy: tensors are shared.
struct VisionContext {
  at::Tensor cu_seqlens;                      ///< `[segments + 1]` int32
  at::Tensor max_seqlen;                      ///< None, as in the reference outside flash attention
  at::Tensor cos, sin;                        ///< `[patches, head_dim]` float32
  const std::vector<std::int64_t>* segments;  ///< Lengths of the segments; owned by the forward.
};

/// The projection of a patch of `channels x frames x side x side` pixels to one vector: a
/// convolution whose kernel and stride are one patch.
class PatchProjection : public Leaf {
 public:
  PatchProjection(Module* parent, std::string name, const VisionConfig& config, bool with_bias);
  /// `[patches, channels, frames, side, side]` -> `[patches, hidden, 1, 1, 1]`. In float32 on the
  /// CPU by the convolution, whose bits are the reference's, unless PatchEmbedding says otherwise;
  /// elsewhere by the equal matrix product.
  at::Tensor apply(const at::Tensor& x) const override;
  at::Tensor output_like(const at::Tensor& x) const override;
  const at::Tensor& weight() const { return weight_; }
  at::ScalarType dtype() const { return weight_.scalar_type(); }

 private:
  PatchEmbedding how_;
  at::Tensor weight_, bias_;
};

/// `[patches, channels * frames * side * side]` pixels -> `[patches, hidden]`.
class PatchEmbed : public Module {
 public:
  PatchEmbed(Module* parent, std::string name, const VisionConfig& config, bool with_bias);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor pixels) const;
  at::Tensor output_like(const at::Tensor& pixels) const override;

  PatchProjection proj;

 private:
  std::vector<std::int64_t> patch_shape_;
};

/// The 2-D rotary tables.
class VisionRotary : public Module {
 public:
  VisionRotary(Module* parent, std::string name, const VisionConfig& config);
  /// Puts cos and sin into the context. `x` is only watched.
  Flow<VisionContext> operator()(Trace& trace, at::Tensor x, at::Tensor coordinates,
                                 VisionContext context) const;

 private:
  at::Tensor inverse_frequencies_;
};

/// Attention within each segment of the row of patches.
class VisionAttention : public Module {
 public:
  VisionAttention(Module* parent, std::string name, const VisionConfig& config, bool eager);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, VisionContext context) const;

  Linear qkv;
  Linear proj;
  Location queries{this, "attention_queries"};  ///< q, k and v, whole rows
  Location image_scores{this, "image_attention_scores"};
  Location image_probabilities{this, "image_attention_probabilities"};
  Location head_outputs{this, "attention_head_outputs"};

 private:
  /// Queries, keys and values of one segment, or of the whole row:
  /// `[1, heads, patches, head_dim]`.
  struct Segment {
    at::Tensor q, k, v;
  };
  static std::vector<Segment> segments_of(const Segment& whole, const VisionContext& context);
  Flow<at::Tensor> attend(Trace& trace, Segment whole, const VisionContext& context) const;
  at::Tensor heads_at_once(const Segment& whole, const VisionContext& context) const;
  at::Tensor heads_of(const Segment& segment, const at::Tensor& pattern) const;

  std::int64_t heads_;
  double scale_;
  bool eager_;
};

/// Linear, activation, linear.
class TwoLayerMlp : public Module {
 public:
  /// What the family calls the three.
  struct Names {
    const char *up, *act_fn, *down;
  };
  TwoLayerMlp(Module* parent, std::string name, const VisionConfig& config, const Names& names);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;

 private:
  Linear up_;
  Activation act_fn_;
  Linear down_;
};

/// linear_fc2(gelu(linear_fc1(x))).
class VisionMlp : public TwoLayerMlp {
 public:
  VisionMlp(Module* parent, std::string name, const VisionConfig& config)
      : TwoLayerMlp(parent, std::move(name), config, {"linear_fc1", "act_fn", "linear_fc2"}) {}
};

/// h = x + attn(norm1(x));  out = h + mlp(norm2(h)).
template <class Norm, class Mlp>
class VisionLayer : public Module {
 public:
  VisionLayer(Module* parent, std::string name, const VisionConfig& config, bool eager)
      : Module(parent, std::move(name), kinds::vision_layer),
        norm1(this, "norm1", config.hidden_size, kVisionNormEps),
        attn(this, "attn", config, eager),
        norm2(this, "norm2", config.hidden_size, kVisionNormEps),
        mlp(this, "mlp", config) {}

  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, VisionContext context) const {
    trace.checkpoint();
    co_await trace.at(input, x, context.cu_seqlens, context.max_seqlen, context.cos, context.sin);
    if (!trace.skip(*this, x)) {
      at::Tensor branch = co_await norm1(trace, x);
      branch = co_await attn(trace, std::move(branch), context);
      x = x + branch;
      branch = co_await norm2(trace, x);
      branch = co_await mlp(trace, std::move(branch));
      x = x + branch;
    }
    co_await trace.at(output, x);
    co_return x;
  }

  Norm norm1;
  VisionAttention attn;
  Norm norm2;
  Mlp mlp;
};

/// Folds each merge block of patches into one image token: norm, concatenation, linear_fc1, GELU
/// (erf), linear_fc2. The projector norms each patch, a DeepStack merger the concatenation.
class Merger : public Module {
 public:
  enum class Norm { kPatch, kBlock };
  Merger(Module* parent, std::string name, const Kind& kind, const VisionConfig& config, Norm norm);
  /// `[patches, hidden]` -> `[image_tokens, out_hidden_size]`.
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;
  at::Tensor output_like(const at::Tensor& x) const override;

  LayerNorm norm;
  Linear linear_fc1;
  Activation act_fn;
  Linear linear_fc2;

 private:
  std::int64_t block_width_;
  Norm norm_;
};

}  // namespace vlscope
