// The mixture of experts that stands in the place of a block's MLP.
#pragma once

#include <string>

#include "models/config.h"
#include "models/layers.h"
#include "models/text/decoder.h"

namespace vlscope {

/// Where each token goes, of all prompts in one row: `[batch * seq, top_k]`.
struct Routing {
  at::Tensor weights;
  at::Tensor indices;  ///< int64
};

/// p = softmax(W x) in float32; the largest of p, divided by their sum. arXiv:1701.06538,
/// 2101.03961.
class Router : public Module {
 public:
  Router(Module* parent, std::string name, std::int64_t width, const MixtureConfig& mixture);
  /// `x` is `[batch * seq, hidden]`.
  Flow<Routing> operator()(Trace& trace, at::Tensor x) const;

  Location router_logits{this, "router_logits"};

 private:
  std::int64_t top_k_;
  at::Tensor weight_;
};

/// y_t = sum over the slots j of token t: w_tj * down(silu(gate(x_t)) * up(x_t)), by the expert
/// that the slot names. `gate_up_proj` is `[experts, 2 * intermediate, hidden]`, the gate's rows
/// first, `down_proj` is `[experts, hidden, intermediate]`.
class Experts : public Module {
 public:
  Experts(Module* parent, std::string name, const TextConfig& config, const MixtureConfig& mixture);
  /// `x` is `[batch * seq, hidden]`.
  /// @throws InputError if an index names no expert
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x, Routing routing) const;

  Activation act_fn;
  Location expert_outputs{this, "expert_outputs"};

 private:
  Flow<at::Tensor> slots(Trace& trace, at::Tensor x, Routing routing) const;

  std::int64_t num_experts_;
  LargeWeight gate_up_proj_, down_proj_;
};

/// routed = experts(x, gate(x)).
class TextMixture : public Module {
 public:
  TextMixture(Module* parent, std::string name, const TextConfig& config);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;

  Experts experts;
  Router gate;
};

/// routed + sigmoid(shared_expert_gate(x)) * shared_expert(x).
class SharedMixture : public TextMixture {
 public:
  SharedMixture(Module* parent, std::string name, const TextConfig& config);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;

  GatedMlp shared_expert;
  Linear shared_expert_gate;
  Location shared_output{this, "shared_expert_output"};
};

}  // namespace vlscope
