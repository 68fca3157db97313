#include "models/text/gated_attention.h"

#include <utility>

namespace vlscope {

GatedAttention::GatedAttention(Module* parent, std::string name, const TextConfig& config,
                               bool eager)
    : TextAttention(parent, std::move(name), config, eager,
                    {config.attention_bias, config.attention_bias, kinds::gated_attention,
                     /*rows_per_query=*/2}),
      q_norm(this, "q_norm", config.head_dim, config.rms_norm_eps),
      k_norm(this, "k_norm", config.head_dim, config.rms_norm_eps) {}

Flow<TextAttention::Heads> GatedAttention::project(Trace& trace, at::Tensor x,
                                                   at::Tensor asking) const {
  Heads heads;
  {
    at::Tensor both = co_await q_proj(trace, asking);
    both = per_head(both).unflatten(2, {-1, 2});
    heads.gate = both.select(3, 1).reshape({asking.size(0), asking.size(1), -1});
    heads.q = both.select(3, 0);
  }
  heads.q = co_await q_norm(trace, std::move(heads.q));
  heads.k = co_await k_proj(trace, x);
  heads.k = co_await k_norm(trace, per_head(heads.k));
  heads.v = co_await v_proj(trace, std::move(x));
  heads.v = per_head(heads.v);
  co_return heads;
}

}  // namespace vlscope
