// The gated delta rule of Gated DeltaNet (arXiv:2412.06464), in the reference's operations and
// their order.
//
// A head's state S is a matrix `[key, value]`, an associative memory. For each token, with k and q
// scaled to length one and q / sqrt(key) for q:
//
//   S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q
//
// All arithmetic is in float32, or in float64 where the values are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace vlscope::ops {

/// What the rule reads. Queries and keys come as they are projected; the rule scales them itself.
struct DeltaRuleInput {
  at::Tensor q, k;           ///< `[batch, seq, heads, key]`
  at::Tensor v;              ///< `[batch, seq, heads, value]`
  at::Tensor decays, betas;  ///< `[batch, seq, heads]`: g <= 0 and beta
  at::Tensor state;          ///< `[batch, heads, key, value]` before the first token

  std::int64_t seq() const { return q.size(1); }
  /// The tokens from `begin` to `end`, from another state.
  DeltaRuleInput part(std::int64_t begin, std::int64_t end, const at::Tensor& from) const;
};

struct DeltaRuleResult {
  at::Tensor heads;  ///< o, `[batch, seq, heads, value]`, in the dtype of q
  at::Tensor state;  ///< `[batch, heads, key, value]` behind the last token
};

/// The rule for a prompt: in chunks of 64 tokens, each of a few matrix products and two triangular
/// solves (arXiv:2406.06484, section 3). Equal to the token-by-token form up to rounding.
DeltaRuleResult chunked_delta_rule(const DeltaRuleInput& in);

/// The rule token by token, as it is written above.
DeltaRuleResult recurrent_delta_rule(const DeltaRuleInput& in);

/// A state put in place of the one behind a token.
struct StateCut {
  std::int64_t token;
  at::Tensor state;
};

/// `rule` (one of the two above), with each cut's state in place of that behind its token: the
/// token reads from it, and the next goes on from it. Cuts are in ascending order, each token once.
DeltaRuleResult delta_rule_with(const DeltaRuleInput& in, const std::vector<StateCut>& cuts,
                                DeltaRuleResult (*rule)(const DeltaRuleInput&));

/// The state behind each token, `[batch, seq, heads, key, value]`, by the token-by-token form.
at::Tensor delta_rule_states(const DeltaRuleInput& in, const std::vector<StateCut>& cuts);

/// o = S^T q of each token for given states; in the dtype of q.
at::Tensor read_states(const at::Tensor& states, const at::Tensor& q);

/// The state behind one token, without keeping those before.
at::Tensor delta_rule_state(const DeltaRuleInput& in, const std::vector<StateCut>& cuts,
                            std::int64_t token);

/// Each channel's own causal convolution over time, without bias: `[batch, channels, seq]` ->
/// the same. `before` holds what came earlier, `[batch, channels, taps]`; undefined means nothing.
/// @param weight `[channels, 1, taps]`, of which the last tap meets the token itself
at::Tensor causal_convolution(const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& before);

}  // namespace vlscope::ops
