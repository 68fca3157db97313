// What every family is to the rest of the engine: a root module with a forward.
#pragma once

#include <string>

#include "hooks/trace.h"
#include "models/config.h"
#include "models/inputs.h"
#include "models/layers.h"

namespace vlscope {

/// How attention is computed. Interior values are served under both.
enum class Attention {
  kEager,  ///< The reference's eager arithmetic: the pattern is always formed.
  kSdpa,   ///< torch's fused kernels; the pattern only for a reader who asks.
};

/// The root of a family's module tree: the text model below `model`, the head, and the forward that
/// runs them.
class CausalLM : public Module {
 public:
  explicit CausalLM(const Config& config);

  /// Ids to logits. `inputs` are checked. Ends with the logits `[batch, kept, vocab]`.
  Flow<at::Tensor> forward(Trace& trace, Inputs inputs) const;
  /// Final norm and head on any stream `[..., hidden]`, watched by nobody.
  at::Tensor project_on_vocab(const at::Tensor& hidden) const;

  const Config& config() const { return config_; }
  /// Where the forward of a recording's tail begins.
  virtual const Location& tail_start() const = 0;

  Linear lm_head;

 protected:
  /// Ids and pixels to the stream behind the final norm, `[batch, seq, hidden]`.
  virtual Flow<at::Tensor> hidden_states(Trace& trace, Inputs& inputs) const = 0;
  virtual const Leaf& final_norm() const = 0;

 private:
  Flow<at::Tensor> head(Trace& trace, at::Tensor hidden, const Inputs& inputs) const;

  const Config config_;
};

}  // namespace vlscope
