// The merger of the Qwen2 lines.
#pragma once

#include <string>
#include <utility>

#include "models/vision/tower.h"

namespace vlscope {

/// Linear, GELU (erf), Linear, one after the other.
class MergerMlp : public Module {
 public:
  MergerMlp(Module* parent, std::string name, const VisionConfig& config);
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const;
  at::Tensor output_like(const at::Tensor& x) const override { return second_.output_like(x); }

 private:
  Linear first_;
  Activation act_fn_;
  Linear second_;
};

/// Folds each merge block of patches into one image token: norm of each patch, concatenation, MLP.
template <class Norm>
class PatchMerger : public Module {
 public:
  PatchMerger(Module* parent, std::string name, const VisionConfig& config)
      : Module(parent, std::move(name), kinds::projector),
        ln_q(this, "ln_q", config.hidden_size, kVisionNormEps),
        mlp(this, "mlp", config),
        block_width_(config.hidden_size * block_area(config)) {}

  /// `[patches, hidden]` -> `[image_tokens, out_hidden_size]`.
  Flow<at::Tensor> operator()(Trace& trace, at::Tensor x) const {
    co_await trace.at(input, x);
    if (!trace.skip(*this, x)) {
      x = co_await ln_q(trace, std::move(x));
      x = x.view({-1, block_width_});
      x = co_await mlp(trace, std::move(x));
    }
    co_await trace.at(output, x);
    co_return x;
  }

  at::Tensor output_like(const at::Tensor& x) const override {
    return mlp.output_like(x.reshape({-1, block_width_}));
  }

  Norm ln_q;
  MergerMlp mlp;

 private:
  std::int64_t block_width_;
};

}  // namespace vlscope
