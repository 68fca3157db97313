#include "models/text/qwen2.h"

#include <utility>

namespace vlscope {

BiasedAttention::BiasedAttention(Module* parent, std::string name, const TextConfig& config,
                                 bool eager)
    : TextAttention(parent, std::move(name), config, eager, {.qkv_bias = true, .out_bias = false}) {
}

Flow<TextAttention::Heads> BiasedAttention::project(Trace& trace, at::Tensor x,
                                                    at::Tensor asking) const {
  Heads heads;
  heads.q = co_await q_proj(trace, std::move(asking));
  heads.k = co_await k_proj(trace, x);
  heads.v = co_await v_proj(trace, std::move(x));
  co_return Heads{per_head(heads.q), per_head(heads.k), per_head(heads.v)};
}

}  // namespace vlscope
