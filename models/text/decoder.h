// The parts of the text model.
#pragma once

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
  at::Tensor cos, sin;          ///< `[batch, seq, head_dim]`
  std::int64_t past = 0;        ///< Positions before the first of this forward.
  BlockCache* cache = nullptr;  ///< Their keys and values; nullptr if nothing is to be remembered.
};

/// The M-RoPE tables.
class TextRotary : public Module {
 public:
  TextRotary(Module* parent, std::string name, const TextConfig& config);
  /// Puts cos and sin into the context. `x` gives the dtype; `positions` is `[3, batch, seq]`.
  Flow<TextContext> operator()(Trace& trace, at::Tensor x, at::Tensor positions,
                               TextContext context) const;

 private:
  at::Tensor inverse_frequencies_;
  std::vector<std::int64_t> section_;
};

/// Grouped-query attention: q = rope(q_norm(W_q x)), k = rope(k_norm(W_k x)), v = W_v x;
/// out = W_o softmax(q k^T / sqrt(head_dim) + mask) v.
class TextAttention : public Module {
 public:
  TextAttention(Module* parent, std::string name, const TextConfig& config, bool eager);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, TextContext context) const;
  /// Rows of the scores for what is offered at `queries`; `site` is one of that location.
  at::Tensor score_rows(Trace& trace, Site site, const ops::RowChoice& rows) const;

  Linear q_proj, k_proj, v_proj, o_proj;
  RmsNorm q_norm, k_norm;
  /// q, k and v; then the mask that will be laid on their scores.
  Location queries{this, "attention_queries"};
  Location scores{this, "attention_scores"};
  Location probabilities{this, "attention_probabilities"};
  Location head_outputs{this, "attention_head_outputs"};

 private:
  struct Heads {
    at::Tensor q, k, v;
  };
  struct Attended {
    at::Tensor heads;    ///< `[batch, seq, heads, head_dim]`
    at::Tensor pattern;  ///< `[batch, heads, seq, seq]`, undefined under sdpa
  };
  Flow<Heads> project(Trace& trace, at::Tensor x, const TextContext& context) const;
  void join_past(Heads& heads, const TextContext& context, bool to_be_served) const;
  Flow<Attended> attend(Trace& trace, const Heads& heads, at::Tensor mask) const;

  std::int64_t head_dim_;
  double scale_;
  bool eager_;
};

/// down_proj(silu(gate_proj(x)) * up_proj(x)).
class TextMlp : public Module {
 public:
  TextMlp(Module* parent, std::string name, const TextConfig& config);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;

  Linear gate_proj;
  Linear up_proj;
  Linear down_proj;
  Activation act_fn;
};

/// h = x + self_attn(input_layernorm(x));  out = h + mlp(post_attention_layernorm(h)).
class TextLayer : public Module {
 public:
  TextLayer(Module* parent, std::string name, const TextConfig& config, bool eager);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, TextContext context) const;

  TextAttention self_attn;
  TextMlp mlp;
  RmsNorm input_layernorm;
  RmsNorm post_attention_layernorm;
};

}  // namespace vlscope
