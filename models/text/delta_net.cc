#include "models/text/delta_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "core/ops/norm.h"
#include "core/ops/precision.h"
#include "core/text.h"

namespace vlscope {
namespace {

/// Slots of the location `entry`, behind the state and the tensors of the rule.
constexpr int kCutTokens = 6, kCutStates = 7;

std::vector<ops::StateCut> cuts_of(const at::Tensor& tokens, const at::Tensor& states) {
  std::vector<ops::StateCut> cuts;
  if (!tokens.defined()) return cuts;
  const auto* token = tokens.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < tokens.size(0); ++i) cuts.push_back({token[i], states[i]});
  return cuts;
}

}  // namespace

CausalConv1d::CausalConv1d(Module* parent, std::string name, std::int64_t channels,
                           std::int64_t kernel)
    : Module(parent, std::move(name), kinds::conv1d), kernel_(kernel) {
  declare("weight", {channels, 1, kernel}, weight_);
}

Flow<at::Tensor> CausalConv1d::operator()(Trace& trace, at::Tensor x,
                                          RecurrentState* carried) const {
  co_await trace.at(input, x);
  const at::Tensor before = carried ? carried->taps : at::Tensor();
  if (carried) carried->taps = last_inputs(x, before);
  if (!trace.skip(*this, x)) x = ops::causal_convolution(x, weight_, before);
  co_await trace.at(output, x);
  co_return x;
}

at::Tensor CausalConv1d::last_inputs(const at::Tensor& x, const at::Tensor& before) const {
  const at::Tensor row = before.defined() ? at::cat({before, x}, 2) : x;
  const std::int64_t missing = kernel_ - row.size(2);
  if (missing > 0) return at::constant_pad_nd(row, {missing, 0}, 0);
  return row.narrow(2, -missing, kernel_).clone();
}

GatedRmsNorm::GatedRmsNorm(Module* parent, std::string name, std::int64_t width, double eps)
    : Module(parent, std::move(name), kinds::gated_rms_norm), eps_(eps) {
  declare("weight", {width}, weight_);
}

Flow<at::Tensor> GatedRmsNorm::operator()(Trace& trace, at::Tensor x, at::Tensor gate) const {
  co_await trace.at(input, x, gate);
  if (!trace.skip(*this, x)) {
    const at::Tensor normed = ops::rms_norm(x, weight_, eps_, ops::NormForm::kPlain);
    x = (normed * at::silu(in_float(gate))).to(x.scalar_type());
  }
  co_await trace.at(output, x);
  co_return x;
}

DeltaNet::DeltaNet(Module* parent, std::string name, const TextConfig& config, bool /*eager*/)
    : Module(parent, std::move(name), kinds::delta_net),
      conv1d(this, "conv1d", config.linear.channels(), config.linear.conv_kernel),
      norm(this, "norm", config.linear.value_head_dim, config.rms_norm_eps),
      out_proj(this, "out_proj", config.linear.value_width(), config.hidden_size, false),
      in_proj_qkv(this, "in_proj_qkv", config.hidden_size, config.linear.channels(), false),
      in_proj_z(this, "in_proj_z", config.hidden_size, config.linear.value_width(), false),
      in_proj_b(this, "in_proj_b", config.hidden_size, config.linear.num_value_heads, false),
      in_proj_a(this, "in_proj_a", config.hidden_size, config.linear.num_value_heads, false),
      config_(config.linear) {
  declare("dt_bias", {config_.num_value_heads}, dt_bias_);
  declare("A_log", {config_.num_value_heads}, a_log_);
}

Flow<at::Tensor> DeltaNet::operator()(Trace& trace, at::Tensor x, TextContext context) const {
  co_await trace.at(input, x, context.padding);
  if (!trace.skip(*this, x)) {
    const std::int64_t batch = x.size(0), seq = x.size(1), width = config_.value_head_dim;
    RecurrentState* carried = context.cache ? &context.cache->recurrent : nullptr;
    if (context.past > 0) {
      check_follows(site_path(), "state behind", carried->positions, context.past);
    }
    // What padding holds must not come into the state.
    if (context.padding.defined()) x = (x * context.padding.unsqueeze(2)).to(x.scalar_type());
    Branches branches = co_await project(trace, std::move(x));
    branches.mixed = co_await conv1d(trace, branches.mixed.transpose(1, 2), carried);
    ops::DeltaRuleInput in = rule_input(branches);
    branches.mixed = branches.a = branches.b = at::Tensor();
    if (carried) in.state = carried->state;

    ops::DeltaRuleResult result = co_await attend(trace, std::move(in), context.past > 0);
    if (carried) {
      carried->state = std::exchange(result.state, {});
      carried->positions += seq;
    }
    at::Tensor rows = std::exchange(result.heads, {}).reshape({-1, width});
    at::Tensor z = std::exchange(branches.z, {}).reshape({-1, width});
    rows = co_await norm(trace, std::move(rows), std::move(z));
    rows = rows.reshape({batch, seq, -1});
    x = co_await out_proj(trace, std::move(rows));
  }
  co_await trace.at(output, x);
  co_return x;
}

Flow<DeltaNet::Branches> DeltaNet::project(Trace& trace, at::Tensor x) const {
  Branches branches;
  branches.mixed = co_await in_proj_qkv(trace, x);
  branches.z = co_await in_proj_z(trace, x);
  branches.b = co_await in_proj_b(trace, x);
  branches.a = co_await in_proj_a(trace, std::move(x));
  co_return branches;
}

ops::DeltaRuleInput DeltaNet::rule_input(const Branches& branches) const {
  const std::int64_t keys = config_.key_width(), values = config_.value_width();
  const std::int64_t sharing = config_.num_value_heads / config_.num_key_heads;
  const at::Tensor mixed = at::silu(branches.mixed).transpose(1, 2);
  const auto heads = [&](std::int64_t from, std::int64_t width, std::int64_t dim) {
    return mixed.narrow(2, from, width).reshape({mixed.size(0), mixed.size(1), -1, dim});
  };
  const auto shared = [&](const at::Tensor& x) {
    return sharing > 1 ? x.repeat_interleave(sharing, 2) : x;
  };
  ops::DeltaRuleInput in;
  in.q = shared(heads(0, keys, config_.key_head_dim));
  in.k = shared(heads(keys, keys, config_.key_head_dim));
  in.v = heads(2 * keys, values, config_.value_head_dim);
  in.betas = ops::apart_from_graph(branches.b.sigmoid());
  in.decays = -in_float(a_log_).exp() * at::softplus(in_float(branches.a) + dt_bias_);
  return in;
}

// The states of all tokens are computed only for a reader who waits for them, and used only if the
// reader has changed them (or put them in a graph).
Flow<ops::DeltaRuleResult> DeltaNet::attend(Trace& trace, ops::DeltaRuleInput in,
                                            bool later_step) const {
  co_await trace.at(projections, in.q, in.k, in.v, in.decays, in.betas, in.state);
  if (!in.state.defined()) {
    in.state = at::zeros({in.v.size(0), in.v.size(2), in.k.size(3), in.v.size(3)},
                         in_float(in.v).options());
  }
  at::Tensor cut_tokens, cut_states;
  co_await trace.at(entry, in.state, in.q, in.k, in.v, in.decays, in.betas, cut_tokens, cut_states);
  const std::vector<ops::StateCut> cuts = cuts_of(cut_tokens, cut_states);

  ops::DeltaRuleResult result;
  bool by_states = false;
  if (trace.wants(states)) {
    at::Tensor each = ops::delta_rule_states(in, cuts);
    by_states = co_await trace.at(states, each);
    if (by_states) result = {ops::read_states(each, in.q), each.select(1, in.seq() - 1)};
  }
  if (!by_states) {
    const bool one_token = later_step && in.seq() == 1;
    const auto rule = one_token ? ops::recurrent_delta_rule : ops::chunked_delta_rule;
    result = ops::delta_rule_with(in, cuts, rule);
  }
  result.state = ops::apart_from_graph(result.state);
  co_await trace.at(heads, result.heads, result.state);
  co_return result;
}

// --- One token's state --------------------------------------------------------------------------

DeltaNet::Offered DeltaNet::offered(Trace& trace, Site site) const {
  const auto slot = [&](int index) {
    site.slot = index;
    return trace.peek(site);
  };
  Offered found;
  found.rule = {slot(1), slot(2), slot(3), slot(4), slot(5), slot(0)};
  found.cuts = cuts_of(slot(kCutTokens), slot(kCutStates));
  return found;
}

std::int64_t DeltaNet::tokens(Trace& trace, Site site) const {
  return offered(trace, std::move(site)).rule.seq();
}

at::Tensor DeltaNet::state_after(Trace& trace, Site site, std::int64_t token) const {
  const Offered found = offered(trace, std::move(site));
  return ops::delta_rule_state(found.rule, found.cuts, token).clone();
}

void DeltaNet::set_state_after(Trace& trace, Site site, std::int64_t token,
                               at::Tensor state) const {
  Offered found = offered(trace, site);
  const at::Tensor& held = found.rule.state;
  if (state.sizes() != held.sizes() || state.scalar_type() != held.scalar_type() ||
      state.device() != held.device()) {
    throw InputError(fmt::format("{} takes {}; the state given is {}.", site.path,
                                 tensor_text(held), tensor_text(state)));
  }
  std::erase_if(found.cuts, [&](const ops::StateCut& cut) { return cut.token == token; });
  const auto place = std::find_if(found.cuts.begin(), found.cuts.end(),
                                  [&](const ops::StateCut& cut) { return cut.token > token; });
  found.cuts.insert(place, {token, std::move(state)});
  std::vector<std::int64_t> tokens;
  std::vector<at::Tensor> states;
  for (const ops::StateCut& cut : found.cuts) {
    tokens.push_back(cut.token);
    states.push_back(cut.state);
  }
  site.slot = kCutTokens;
  trace.amend(site, at::tensor(tokens));
  site.slot = kCutStates;
  trace.amend(site, at::stack(states));
}

}  // namespace vlscope
