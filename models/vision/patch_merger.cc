#include "models/vision/patch_merger.h"

namespace vlscope {

MergerMlp::MergerMlp(Module* parent, std::string name, const VisionConfig& config)
    : Module(parent, std::move(name), kinds::sequential),
      first_(this, "0", config.hidden_size * block_area(config),
             config.hidden_size * block_area(config), true),
      act_fn_(this, "1", "gelu"),
      second_(this, "2", config.hidden_size * block_area(config), config.out_hidden_size, true) {}

Flow<at::Tensor> MergerMlp::operator()(Trace& trace, at::Tensor x) const {
  co_await trace.at(input, x);
  if (!trace.skip(*this, x)) {
    x = co_await first_(trace, std::move(x));
    x = co_await act_fn_(trace, std::move(x));
    x = co_await second_(trace, std::move(x));
  }
  co_await trace.at(output, x);
  co_return x;
}

}  // namespace vlscope
