// The text model of the Qwen2 lines.
#pragma once

#include <string>

#include "models/text/model.h"

namespace vlscope {

/// Attention with biases on queries, keys and values, and no norm of heads.
class BiasedAttention : public TextAttention {
 public:
  BiasedAttention(Module* parent, std::string name, const TextConfig& config, bool eager);

 protected:
  Flow<Heads> project(Trace& trace, at::Tensor x, at::Tensor asking) const override;
};

inline constexpr TextParts kQwen2Text{build_block<TextLayer<BiasedAttention, TextMlp>>,
                                      build_norm<RmsNorm>};

}  // namespace vlscope
