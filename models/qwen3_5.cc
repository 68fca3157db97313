#include "models/qwen3_5.h"

#include <memory>
#include <utility>

#include "models/text/delta_net.h"
#include "models/text/gated_attention.h"
#include "models/text/moe.h"

namespace vlscope {
namespace {

template <class Mixer, class Mlp>
std::unique_ptr<TextBlock> build_layer(BlockPlace place, const TextConfig& config, bool eager) {
  return build_block<TextLayer<Mixer, Mlp, ZeroCenteredRmsNorm>>(std::move(place), config, eager);
}

/// A block has one of the two mixers, and says which if it is asked for the other.
template <class Mlp>
std::unique_ptr<TextBlock> build_mixed_block(BlockPlace place, const TextConfig& config,
                                             bool eager) {
  const bool linear = config.mixers.at(place.index) == Mixer::kLinearAttention;
  auto block = linear ? build_layer<DeltaNet, Mlp>(std::move(place), config, eager)
                      : build_layer<GatedAttention, Mlp>(std::move(place), config, eager);
  const char* const here = linear ? DeltaNet::kName : GatedAttention::kName;
  block->set_absent(linear ? GatedAttention::kName : DeltaNet::kName,
                    std::string("this block's mixer is ") + here);
  return block;
}

}  // namespace

Qwen3_5::Qwen3_5(const Config& config, Attention attention)
    : VisionLanguageModel(config, attention,
                          {build_tower<Qwen3_5Vision>,
                           {build_mixed_block<TextMlp>, build_norm<ZeroCenteredRmsNorm>}}) {}

Qwen3_5Moe::Qwen3_5Moe(const Config& config, Attention attention)
    : VisionLanguageModel(config, attention,
                          {build_tower<Qwen3_5Vision>,
                           {build_mixed_block<SharedMixture>, build_norm<ZeroCenteredRmsNorm>}}) {}

}  // namespace vlscope
