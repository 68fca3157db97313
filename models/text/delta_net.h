// Gated DeltaNet: a linear attention, whose heads keep a matrix in place of keys and values.
#pragma once

#include <string>
#include <vector>

#include "core/ops/delta_rule.h"
#include "models/text/decoder.h"

namespace vlscope {

/// The convolution over time, as a module that can be watched.
class CausalConv1d : public Module {
 public:
  CausalConv1d(Module* parent, std::string name, std::int64_t channels, std::int64_t kernel);
  /// `[batch, channels, seq]` to the same. What it goes on from is in `carried` and is renewed
  /// there; nullptr if nothing is to be remembered.
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, RecurrentState* carried) const;

 private:
  at::Tensor last_inputs(const at::Tensor& x, const at::Tensor& before) const;

  std::int64_t kernel_;
  at::Tensor weight_;
};

/// y = weight * x / rms(x) * silu(gate), the norm in float32 and cast back before the weight.
class GatedRmsNorm : public Module {
 public:
  GatedRmsNorm(Module* parent, std::string name, std::int64_t width, double eps);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, at::Tensor gate) const;

 private:
  double eps_;
  at::Tensor weight_;
};

/// q, k, v = silu(conv1d(W_qkv x)), z = W_z x, beta = sigmoid(W_b x),
/// g = -exp(A_log) softplus(W_a x + dt_bias); out = W_o norm(delta_rule(q, k, v, g, beta), z).
/// arXiv:2412.06464; the rule is in core/ops/delta_rule.h.
class DeltaNet : public Module {
 public:
  static constexpr const char* kName = "linear_attn";
  static at::Tensor& mask(TextContext& context) { return context.padding; }

  DeltaNet(Module* parent, std::string name, const TextConfig& config, bool eager);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, TextContext context) const;

  /// The state behind `token`, for what is offered at `entry`; `site` is one of that location.
  at::Tensor state_after(Trace& trace, Site site, std::int64_t token) const;
  /// Puts `state` in its place. The same token again takes the place of what was put there before.
  /// @throws InputError if shape, dtype or device differ from those of a state
  void set_state_after(Trace& trace, Site site, std::int64_t token, at::Tensor state) const;
  /// Tokens of the forward that stands at `entry`.
  std::int64_t tokens(Trace& trace, Site site) const;

  CausalConv1d conv1d;
  GatedRmsNorm norm;
  Linear out_proj, in_proj_qkv, in_proj_z, in_proj_b, in_proj_a;
  Location projections{this, "attention_queries"};  ///< q, k, v, g, beta, the cached state
  /// The state before the first token; then, for state_after and set_state_after, q, k, v, g, beta
  /// and what was put in place of states: tokens `[n]` and states `[n, batch, heads, key, value]`.
  Location entry{this, "state"};
  Location states{this, "states"};
  Location heads{this, "attention_head_outputs"};  ///< and the state behind the last token

 private:
  struct Offered {
    ops::DeltaRuleInput rule;
    std::vector<ops::StateCut> cuts;
  };
  /// What the projections of the stream become.
  struct Branches {
    at::Tensor mixed, z, b, a;
  };
  Flow<Branches> project(Trace& trace, at::Tensor x) const;
  /// The rule's tensors from `mixed`, convolved `[batch, channels, seq]`, and from b and a.
  ops::DeltaRuleInput rule_input(const Branches& branches) const;
  Flow<ops::DeltaRuleResult> attend(Trace& trace, ops::DeltaRuleInput in, bool later_step) const;
  Offered offered(Trace& trace, Site site) const;

  LinearAttentionConfig config_;
  at::Tensor a_log_, dt_bias_;
};

}  // namespace vlscope
