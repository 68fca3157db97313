// The parts of the text model's blocks.
#pragma once

#include <ATen/TensorOperators.h>

#include <string>
#include <vector>

#include "core/ops/attention.h"
#include "models/config.h"
#include "models/layers.h"
#include "models/text/cache.h"

namespace vlscope {

/// What every text block reads besides the stream. Cheap to copy: tensors are shared.
struct TextContext {
  at::Tensor mask;              ///< See ops::attention_scores; undefined means causal.
  at::Tensor padding;           ///< `[batch, seq]`, 0 on padding; undefined where there is none.
  at::Tensor cos, sin;          ///< `[batch, seq, rotated dimensions of a head]`
  std::int64_t past = 0;        ///< Positions before the first of this forward.
  BlockCache* cache = nullptr;  ///< What they left; nullptr if nothing is to be remembered.
  const BlockCache* before = nullptr;  ///< What they left of a prompt whose tail this is.
  /// How many of the last positions go on from this block: the others give their keys and values
  /// alone. 0 for all.
  std::int64_t kept = 0;

  /// What goes on of `x`, with the positions along `axis`.
  at::Tensor going_on(const at::Tensor& x, std::int64_t axis = 1) const {
    return kept == 0 || !x.defined() ? x : x.narrow(axis, x.size(axis) - kept, kept);
  }
};

/// The M-RoPE tables, interleaved or by sections as the config says.
class TextRotary : public Module {
 public:
  TextRotary(Module* parent, std::string name, const TextConfig& config);
  /// Puts cos and sin into the context. `x` gives the dtype; `positions` is `[3, batch, seq]`.
  Flow<TextContext> operator()(Trace& trace, at::Tensor x, at::Tensor positions,
                               TextContext context) const;

 private:
  at::Tensor inverse_frequencies_;
  RopeConfig rope_;
};

/// Grouped-query attention: q = rope(W_q x), k = rope(W_k x), v = W_v x;
/// out = W_o softmax(q k^T / sqrt(head_dim) + mask) v. A family derives from it what it does to the
/// projections before they are rotated.
class TextAttention : public Module {
 public:
  static constexpr const char* kName = "self_attn";
  static at::Tensor& mask(TextContext& context) { return context.mask; }

  struct Form {
    bool qkv_bias, out_bias;
    const Kind& kind = kinds::text_attention;
    std::int64_t rows_per_query = 1;  ///< Of W_q, for each number of a query; 2 if it gives a gate.
  };
  TextAttention(Module* parent, std::string name, const TextConfig& config, bool eager, Form form);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, TextContext context) const;
  /// Rows of the scores for what is offered at `queries`; `site` is one of that location.
  at::Tensor score_rows(Trace& trace, Site site, const ops::RowChoice& rows) const;

  Linear q_proj, k_proj, v_proj, o_proj;
  /// q, k and v; then the mask that will be laid on their scores.
  Location queries{this, "attention_queries"};
  Location scores{this, "attention_scores"};
  Location probabilities{this, "attention_probabilities"};
  Location head_outputs{this, "attention_head_outputs"};

 protected:
  /// `[batch, seq, heads, head_dim]` before the rotation, `[batch, heads, seq, head_dim]` after.
  struct Heads {
    at::Tensor q, k, v;
    at::Tensor gate = {};  ///< `[batch, seq, heads * head_dim]`; out = W_o (sigmoid(gate) heads)
  };
  /// The stream to heads, not yet rotated: keys and values of `x`, queries of the rows of it in
  /// `asking`.
  virtual Flow<Heads> project(Trace& trace, at::Tensor x, at::Tensor asking) const = 0;
  /// `[batch, seq, width]` -> `[batch, seq, heads, head_dim]`.
  at::Tensor per_head(const at::Tensor& x) const;

 private:
  struct Attended {
    at::Tensor heads;    ///< `[batch, seq, heads, head_dim]`
    at::Tensor pattern;  ///< `[batch, heads, seq, seq]`, undefined under sdpa
  };
  Flow<Heads> place(Trace& trace, Heads heads, const TextContext& context) const;
  void join_past(Heads& heads, const TextContext& context, bool to_be_served) const;
  Flow<Attended> attend(Trace& trace, const Heads& heads, at::Tensor mask) const;

  std::int64_t head_dim_;
  double scale_;
  bool eager_;
};

/// With a norm of each query and key head before the rotation: q = rope(q_norm(W_q x)).
class NormedAttention : public TextAttention {
 public:
  NormedAttention(Module* parent, std::string name, const TextConfig& config, bool eager);

  RmsNorm q_norm, k_norm;

 protected:
  Flow<Heads> project(Trace& trace, at::Tensor x, at::Tensor asking) const override;
};

/// down_proj(silu(gate_proj(x)) * up_proj(x)).
class GatedMlp : public Module {
 public:
  struct Widths {
    std::int64_t hidden, intermediate;
  };
  GatedMlp(Module* parent, std::string name, const Kind& kind, Widths widths, bool with_bias);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;

  Linear gate_proj;
  Linear up_proj;
  Linear down_proj;
  Activation act_fn;
};

/// The dense MLP of a text block.
class TextMlp : public GatedMlp {
 public:
  TextMlp(Module* parent, std::string name, const TextConfig& config)
      : GatedMlp(parent, std::move(name), kinds::text_mlp,
                 {config.hidden_size, config.intermediate_size}, /*with_bias=*/false) {}
};

/// A block of the text model, as the model runs it: `[batch, seq, hidden]` to the same.
class TextBlock : public Module {
 public:
  using Module::Module;
  virtual Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, TextContext context) const = 0;
  /// Where the block's weights are.
  virtual at::Device device() const = 0;
};

/// h = x + mixer(input_layernorm(x));  out = h + mlp(post_attention_layernorm(h)). The mixer is the
/// attention, or what stands in its place.
template <class Mixer, class Mlp, class Norm = RmsNorm>
class TextLayer : public TextBlock {
 public:
  TextLayer(Module* parent, std::string name, const TextConfig& config, bool eager)
      : TextBlock(parent, std::move(name), kinds::text_layer),
        mixer(this, Mixer::kName, config, eager),
        mlp(this, "mlp", config),
        input_layernorm(this, "input_layernorm", config.hidden_size, config.rms_norm_eps),
        post_attention_layernorm(this, "post_attention_layernorm", config.hidden_size,
                                 config.rms_norm_eps) {}

  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, TextContext context) const override {
    trace.checkpoint();
    co_await trace.at(input, x, Mixer::mask(context), context.cos, context.sin);
    if (!trace.skip(*this, x)) {
      at::Tensor branch = co_await input_layernorm(trace, x);
      branch = co_await mixer(trace, std::move(branch), context);
      x = context.going_on(x) + context.going_on(branch);
      branch = co_await post_attention_layernorm(trace, x);
      branch = co_await mlp(trace, std::move(branch));
      x = x + branch;
    }
    co_await trace.at(output, x);
    co_return x;
  }
  at::Device device() const override { return input_layernorm.device(); }

  Mixer mixer;
  Mlp mlp;
  Norm input_layernorm;
  Norm post_attention_layernorm;
};

}  // namespace vlscope
