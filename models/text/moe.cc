#include "models/text/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <fmt/format.h>

#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/ops/precision.h"

namespace vlscope {
namespace {

/// How many times each of `experts` is named by `sorted`.
std::vector<std::int64_t> count(const at::Tensor& sorted, std::int64_t experts,
                                const std::string& where) {
  std::vector<std::int64_t> rows(experts, 0);
  if (sorted.is_meta()) {  // Shapes alone: any expert will do.
    rows.front() = sorted.numel();
    return rows;
  }
  const at::Tensor named = sorted.cpu().contiguous();
  const auto* first = named.const_data_ptr<std::int64_t>();
  for (const std::int64_t* expert = first; expert != first + named.numel(); ++expert) {
    if (*expert < 0 || *expert >= experts) {
      throw InputError(fmt::format("{}.expert_indices holds {}; the experts are 0 to {}.", where,
                                   *expert, experts - 1));
    }
    ++rows[*expert];
  }
  return rows;
}

/// y = x W_e^T for the rows of each expert e. An expert without rows is not touched: its weights
/// stay on disk.
at::Tensor linear_by_expert(const at::Tensor& x, const LargeWeight& weights,
                            const std::vector<std::int64_t>& rows) {
  std::vector<at::Tensor> results;
  const auto experts = static_cast<std::int64_t>(rows.size());
  std::int64_t begin = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (rows[e] == 0) continue;
    at::Tensor weight = weights.expert(e, experts, x);
    // The last bits of a float32 product depend on the order of the axes in memory. The reference
    // has the rows one after the other, whatever the file has.
    if (weight.scalar_type() == at::kFloat) weight = weight.contiguous();
    results.push_back(at::mm(x.narrow(0, begin, rows[e]), weight.t()));
    begin += rows[e];
  }
  return at::cat(results);
}

}  // namespace

Router::Router(Module* parent, std::string name, std::int64_t width, const MixtureConfig& mixture)
    : Module(parent, std::move(name), kinds::router), top_k_(mixture.top_k) {
  declare("weight", {mixture.num_experts, width}, weight_);
}

Flow<Routing> Router::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  at::Tensor logits = at::linear(x, weight_);
  x = at::Tensor();
  co_await trace.at(router_logits, logits);
  const at::Tensor shares = at::softmax(logits, -1, ops::precise(logits.scalar_type()));
  auto [largest, indices] = at::topk(shares, top_k_, -1);
  Routing routing;
  routing.weights = (largest / largest.sum(-1, /*keepdim=*/true)).to(logits.scalar_type());
  // The backward pass of top-k keeps the indices; an edit must not reach those.
  routing.indices = largest.requires_grad() ? indices.clone() : indices;
  co_await trace.at(output, logits, routing.weights, routing.indices);
  co_return routing;
}

Experts::Experts(Module* parent, std::string name, const TextConfig& config,
                 const MixtureConfig& mixture)
    : Module(parent, std::move(name), kinds::experts),
      act_fn(this, "act_fn", config.hidden_act),
      num_experts_(mixture.num_experts) {
  const std::int64_t width = config.hidden_size, inner = mixture.intermediate_size;
  declare("gate_up_proj", {num_experts_, 2 * inner, width}, gate_up_proj_,
          {"gate_proj.weight", "up_proj.weight"});
  declare("down_proj", {num_experts_, width, inner}, down_proj_, {"down_proj.weight"});
}

Flow<at::Tensor> Experts::operator()(Trace& trace, at::Tensor x, Routing routing) const {
  co_await trace.at(input, x, routing.indices, routing.weights);
  if (!trace.skip(*this, x)) {
    at::Tensor outputs = co_await slots(trace, std::move(x), std::move(routing));
    co_await trace.at(expert_outputs, outputs);
    x = outputs.sum(1);
  }
  co_await trace.at(output, x);
  co_return x;
}

/// `[tokens, top_k, hidden]`. The operations of the reference's grouped_mm, in their order.
Flow<at::Tensor> Experts::slots(Trace& trace, at::Tensor x, Routing routing) const {
  const std::int64_t tokens = x.size(0), top_k = routing.indices.size(1);
  const auto [sorted, order] = at::sort(routing.indices.reshape(-1));
  const std::vector<std::int64_t> rows = count(sorted, num_experts_, parent()->site_path());

  x = x.index({order.div(top_k, "floor")});
  x = linear_by_expert(x, gate_up_proj_, rows);
  std::vector<at::Tensor> halves = x.chunk(2, -1);
  at::Tensor gate = co_await act_fn(trace, std::exchange(halves[0], {}));
  x = std::exchange(gate, {}) * std::exchange(halves[1], {});
  x = linear_by_expert(x, down_proj_, rows);
  x = x * routing.weights.reshape(-1).index({order}).unsqueeze(-1);
  co_return x.index({at::argsort(order)}).view({tokens, top_k, -1});
}

TextMixture::TextMixture(Module* parent, std::string name, const TextConfig& config)
    : Module(parent, std::move(name), kinds::text_mixture),
      experts(this, "experts", config, *config.mixture),
      gate(this, "gate", config.hidden_size, *config.mixture) {}

Flow<at::Tensor> TextMixture::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) {
    const std::vector<std::int64_t> shape = x.sizes().vec();
    x = x.view({-1, shape.back()});
    Routing routing = co_await gate(trace, x);
    x = co_await experts(trace, std::move(x), std::move(routing));
    x = x.reshape(shape);
  }
  co_await trace.at(output, x);
  co_return x;
}

SharedMixture::SharedMixture(Module* parent, std::string name, const TextConfig& config)
    : TextMixture(parent, std::move(name), config),
      shared_expert(this, "shared_expert", kinds::shared_expert,
                    {config.hidden_size, config.mixture->shared_intermediate_size},
                    /*with_bias=*/false),
      shared_expert_gate(this, "shared_expert_gate", config.hidden_size, 1, false) {}

// The shared expert comes before the router, and its gate after the experts, as in the reference.
Flow<at::Tensor> SharedMixture::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) {
    const std::vector<std::int64_t> shape = x.sizes().vec();
    x = x.view({-1, shape.back()});
    at::Tensor shared = co_await shared_expert(trace, x);
    Routing routing = co_await gate(trace, x);
    at::Tensor routed = co_await experts(trace, x, std::move(routing));
    at::Tensor open = co_await shared_expert_gate(trace, std::move(x));
    shared = std::exchange(open, {}).sigmoid() * shared;
    co_await trace.at(shared_output, shared);
    x = (routed + shared).reshape(shape);
  }
  co_await trace.at(output, x);
  co_return x;
}

}  // namespace vlscope
