// Softmax attention whose heads pass a gate on their way out.
#pragma once

#include <string>

#include "models/text/decoder.h"

namespace vlscope {

/// q, gate = W_q x, for each head its queries and behind them its gate; q and k are normed per
/// head, and out = W_o (sigmoid(gate) heads).
class GatedAttention : public TextAttention {
 public:
  GatedAttention(Module* parent, std::string name, const TextConfig& config, bool eager);

  ZeroCenteredRmsNorm q_norm, k_norm;

 protected:
  Flow<Heads> project(Trace& trace, at::Tensor x, at::Tensor asking) const override;
};

}  // namespace vlscope
