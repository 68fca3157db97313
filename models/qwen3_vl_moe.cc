#include "models/qwen3_vl_moe.h"

#include <memory>
#include <string>
#include <utility>

#include "models/qwen3_vl.h"
#include "models/text/moe.h"

namespace vlscope {
namespace {

/// A mixture whose output is what its routed experts give.
class RoutedMixture : public TextMixture {
 public:
  RoutedMixture(Module* parent, std::string name, const TextConfig& config)
      : TextMixture(parent, std::move(name), config) {
    set_unavailable("shared_expert_output",
                    "this family has no shared expert: mlp_output is routed_output alone");
  }
};

std::unique_ptr<TextBlock> build_sparse_or_dense(BlockPlace place, const TextConfig& config,
                                                 bool eager) {
  const bool sparse = config.mixture->covers(static_cast<std::int64_t>(place.index));
  return sparse ? build_block<TextLayer<NormedAttention, RoutedMixture>>(std::move(place), config,
                                                                         eager)
                : build_block<TextLayer<NormedAttention, TextMlp>>(std::move(place), config, eager);
}

}  // namespace

Qwen3VLMoe::Qwen3VLMoe(const Config& config, Attention attention)
    : VisionLanguageModel(
          config, attention,
          {build_tower<Qwen3VLVision>, {build_sparse_or_dense, build_norm<RmsNorm>}}) {}

}  // namespace vlscope
