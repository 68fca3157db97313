#include "core/ops/delta_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <limits>

#include "core/ops/precision.h"

namespace vlscope::ops {
namespace {

constexpr std::int64_t kChunk = 64;

/// x / |x| along the last axis.
at::Tensor unit(const at::Tensor& x) {
  return x * at::rsqrt((x * x).sum(-1, /*keepdim=*/true) + 1e-6);
}

/// The same tensors with the heads before the tokens, in float32, q and k scaled to length one.
struct Prepared {
  explicit Prepared(const DeltaRuleInput& in)
      : q(unit(by_head(in.q))),
        k(unit(by_head(in.k))),
        v(by_head(in.v)),
        betas(by_head(in.betas)),
        decays(by_head(in.decays)),
        state(in.state.to(v.options())) {}

  at::Tensor q, k, v, betas, decays, state;

 private:
  static at::Tensor by_head(const at::Tensor& x) {
    return x.transpose(1, 2).to(precise(x.scalar_type()), /*non_blocking=*/false, /*copy=*/false,
                                at::MemoryFormat::Contiguous);
  }
};

/// `[batch, heads, seq, ...]` with empty tokens behind, up to a whole number of chunks.
at::Tensor padded(const at::Tensor& x) {
  const std::int64_t extra = (kChunk - x.size(2) % kChunk) % kChunk;
  return x.dim() == 4 ? at::constant_pad_nd(x, {0, 0, 0, extra}, 0)
                      : at::constant_pad_nd(x, {0, extra}, 0);
}

/// `[batch, heads, seq, ...]` -> `[batch, heads, chunks, kChunk, ...]`.
at::Tensor split(const at::Tensor& x) {
  if (x.dim() == 3) return x.reshape({x.size(0), x.size(1), -1, kChunk});
  return x.reshape({x.size(0), x.size(1), -1, kChunk, x.size(3)});
}

/// What happens within each chunk, before any state is known. Axes `[batch, heads, chunk, ...]`.
struct Chunks {
  explicit Chunks(const Prepared& in) {
    const double scale = std::pow(static_cast<double>(in.q.size(-1)), -0.5);
    const at::Tensor q = split(padded(in.q * scale));
    const at::Tensor all_k = padded(in.k), betas = padded(in.betas).unsqueeze(-1);
    const at::Tensor v_beta = split(padded(in.v) * betas), k_beta = split(all_k * betas);
    const at::Tensor k = split(all_k), decay = split(padded(in.decays)).cumsum(3);

    // exp(G_i - G_j) for token i after j; later tokens do not act on earlier ones.
    const at::Tensor later = at::ones({kChunk, kChunk}, decay.options().dtype(at::kBool)).triu(1);
    const at::Tensor between = (decay.unsqueeze(4) - decay.unsqueeze(3))
                                   .masked_fill(later, -std::numeric_limits<double>::infinity())
                                   .exp();
    const at::Tensor system = at::matmul(k_beta, k.transpose(-1, -2)) * between;
    within = at::matmul(q, k.transpose(-1, -2)) * between;
    const at::Tensor since_begin = decay.exp().unsqueeze(-1);
    const auto solve = [&](const at::Tensor& right) {
      return at::linalg_solve_triangular(system, right, /*upper=*/false, /*left=*/true,
                                         /*unitriangular=*/true);
    };
    values = solve(v_beta);
    reads = solve(k_beta * since_begin);
    queries = q * since_begin;
    keys = k * (decay.narrow(-1, kChunk - 1, 1) - decay).exp().unsqueeze(-1);
    decays = decay.select(-1, kChunk - 1).exp().unsqueeze(-1).unsqueeze(-1);
  }

  std::int64_t count() const { return values.size(2); }

  at::Tensor within;   ///< q k^T of a chunk, decayed
  at::Tensor values;   ///< what the tokens write if the state is zero
  at::Tensor reads;    ///< how the state entering the chunk lessens that
  at::Tensor queries;  ///< q, decayed since the chunk began
  at::Tensor keys;     ///< k, decayed to the chunk's end
  at::Tensor decays;   ///< of the whole chunk
};

/// One token: what the state becomes.
at::Tensor step(const Prepared& in, const at::Tensor& state, std::int64_t token) {
  const at::Tensor k = in.k.select(2, token), v = in.v.select(2, token);
  const at::Tensor decay = in.decays.select(2, token).exp().unsqueeze(-1).unsqueeze(-1);
  const at::Tensor faded = state * decay;
  const at::Tensor held = (faded * k.unsqueeze(-1)).sum(-2);
  const at::Tensor written = (v - held) * in.betas.select(2, token).unsqueeze(-1);
  return faded + k.unsqueeze(-1) * written.unsqueeze(-2);
}

/// The scaled queries of the token-by-token form; `unit_q` of any axes, the last being the key's.
at::Tensor scaled(const at::Tensor& unit_q) {
  return unit_q / std::sqrt(static_cast<double>(unit_q.size(-1)));
}

/// For shapes alone: without a loop over the tokens.
DeltaRuleResult empty_result(const DeltaRuleInput& in) {
  return {at::empty_like(in.v).to(in.q.scalar_type()),
          at::empty_like(in.state).to(precise(in.v.scalar_type()))};
}

}  // namespace

DeltaRuleInput DeltaRuleInput::part(std::int64_t begin, std::int64_t end,
                                    const at::Tensor& from) const {
  const auto tokens = [&](const at::Tensor& x) { return x.narrow(1, begin, end - begin); };
  return {tokens(q), tokens(k), tokens(v), tokens(decays), tokens(betas), from};
}

DeltaRuleResult chunked_delta_rule(const DeltaRuleInput& in) {
  if (in.q.is_meta()) return empty_result(in);
  const Prepared prepared(in);
  const Chunks chunk(prepared);
  at::Tensor state = prepared.state;
  std::vector<at::Tensor> heads;
  for (std::int64_t i = 0; i < chunk.count(); ++i) {
    const auto of = [i](const at::Tensor& x) { return x.select(2, i); };
    const at::Tensor written = of(chunk.values) - at::matmul(of(chunk.reads), state);
    const at::Tensor from_state = at::matmul(of(chunk.queries), state);
    heads.push_back(from_state + at::matmul(of(chunk.within), written));
    state = state * of(chunk.decays) + at::matmul(of(chunk.keys).transpose(-1, -2), written);
  }
  at::Tensor joined = at::stack(heads, 2).flatten(2, 3).narrow(2, 0, in.seq()).transpose(1, 2);
  return {joined.to(in.q.scalar_type(), false, false, at::MemoryFormat::Contiguous), state};
}

DeltaRuleResult recurrent_delta_rule(const DeltaRuleInput& in) {
  if (in.q.is_meta()) return empty_result(in);
  const Prepared prepared(in);
  const at::Tensor q = scaled(prepared.q);
  at::Tensor state = prepared.state;
  std::vector<at::Tensor> heads;
  for (std::int64_t token = 0; token < in.seq(); ++token) {
    state = step(prepared, state, token);
    heads.push_back((state * q.select(2, token).unsqueeze(-1)).sum(-2));
  }
  return {at::stack(heads, 1).to(in.q.scalar_type()), state};
}

DeltaRuleResult delta_rule_with(const DeltaRuleInput& in, const std::vector<StateCut>& cuts,
                                DeltaRuleResult (*rule)(const DeltaRuleInput&)) {
  if (cuts.empty()) return rule(in);
  std::vector<at::Tensor> heads;
  at::Tensor state = in.state;
  std::int64_t next = 0;
  for (const StateCut& cut : cuts) {
    if (cut.token > next) heads.push_back(rule(in.part(next, cut.token, state)).heads);
    state = cut.state;
    heads.push_back(read_states(state.unsqueeze(1), in.q.narrow(1, cut.token, 1)));
    next = cut.token + 1;
  }
  if (next < in.seq()) {
    DeltaRuleResult rest = rule(in.part(next, in.seq(), state));
    heads.push_back(std::move(rest.heads));
    state = std::move(rest.state);
  }
  return {at::cat(heads, 1), state};
}

at::Tensor delta_rule_states(const DeltaRuleInput& in, const std::vector<StateCut>& cuts) {
  if (in.q.is_meta()) {
    const at::Tensor one = empty_result(in).state.unsqueeze(1);
    return one.expand({-1, in.seq(), -1, -1, -1});
  }
  const Prepared prepared(in);
  at::Tensor state = prepared.state;
  std::vector<at::Tensor> states;
  auto cut = cuts.begin();
  for (std::int64_t token = 0; token < in.seq(); ++token) {
    const bool replaced = cut != cuts.end() && cut->token == token;
    state = replaced ? (cut++)->state : step(prepared, state, token);
    states.push_back(state);
  }
  return at::stack(states, 1);
}

at::Tensor read_states(const at::Tensor& states, const at::Tensor& q) {
  const at::Tensor queries = scaled(unit(q.to(precise(q.scalar_type()))));
  return (states * queries.unsqueeze(-1)).sum(-2).to(q.scalar_type());
}

at::Tensor delta_rule_state(const DeltaRuleInput& in, const std::vector<StateCut>& cuts,
                            std::int64_t token) {
  const Prepared prepared(in);
  at::Tensor state = prepared.state;
  std::int64_t next = 0;
  for (const StateCut& cut : cuts) {
    if (cut.token > token) break;
    state = cut.state;
    next = cut.token + 1;
  }
  for (; next <= token; ++next) state = step(prepared, state, next);
  return state;
}

at::Tensor causal_convolution(const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& before) {
  if (x.is_meta()) return at::empty_like(x);  // torch has the rule for shapes alone in Python.
  const std::int64_t channels = x.size(1), seq = x.size(2), taps = weight.size(2);
  const auto convolve = [&](const at::Tensor& row, std::int64_t padding) {
    return at::conv1d(row, weight, /*bias=*/{}, /*stride=*/1, padding, /*dilation=*/1, channels);
  };
  if (!before.defined()) return convolve(x, taps - 1).narrow(2, 0, seq);
  const at::Tensor row = convolve(at::cat({before, x}, 2), 0);
  return row.narrow(2, row.size(2) - seq, seq);
}

}  // namespace vlscope::ops
