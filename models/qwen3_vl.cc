#include "models/qwen3_vl.h"

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/device.h"

namespace vlscope {
namespace {

std::string indexed(const char* list, std::size_t i) { return fmt::format("{}.{}", list, i); }

}  // namespace

Qwen3VLVision::Qwen3VLVision(Module* parent, std::string name, const VisionConfig& config,
                             bool eager)
    : VisionTower(parent, std::move(name)),
      patch_embed(this, "patch_embed", config, /*with_bias=*/true),
      pos_embed(this, "pos_embed", config.num_position_embeddings, config.hidden_size),
      rotary_pos_emb(this, "rotary_pos_emb", config),
      merger(this, "merger", kinds::projector, config, Merger::Norm::kPatch),
      taps_(config.deepstack_visual_indexes),
      merge_(config.spatial_merge_size),
      table_side_(std::lround(std::sqrt(static_cast<double>(config.num_position_embeddings)))) {
  for (std::int64_t i = 0; i < config.depth; ++i) {
    blocks.push_back(std::make_unique<VisionLayer<LayerNorm, VisionMlp>>(this, indexed("blocks", i),
                                                                         config, eager));
  }
  for (std::size_t k = 0; k < taps_.size(); ++k) {
    deepstack_merger_list.push_back(std::make_unique<Merger>(
        this, indexed("deepstack_merger_list", k), kinds::merger, config, Merger::Norm::kBlock));
  }
}

const Merger* Qwen3VLVision::tap_after(std::size_t block) const {
  const auto tap = std::find(taps_.begin(), taps_.end(), static_cast<std::int64_t>(block));
  return tap == taps_.end() ? nullptr : deepstack_merger_list[tap - taps_.begin()].get();
}

Flow<at::Tensor> Qwen3VLVision::embed(Trace& trace, at::Tensor pixels,
                                      const std::vector<Grid>& grids) const {
  const at::Device device = pixels.device();
  at::Tensor x = co_await patch_embed(trace, std::move(pixels));
  const PositionBlend blend = position_blend(grids, merge_, table_side_);
  at::Tensor positions = on_device(blend.taps, device);
  positions = co_await pos_embed(trace, std::move(positions));
  positions = (positions * on_device(blend.weights, device).unsqueeze(-1)).sum(1);
  co_return x + positions.to(x.scalar_type());
}

Flow<VisionFeatures> Qwen3VLVision::operator()(Trace& trace, at::Tensor pixels,
                                               at::Tensor grid_thw) const {
  VisionFeatures features;
  co_await trace.at(input, pixels, grid_thw);
  const at::Device device = pixels.device();
  const std::vector<Grid> grids = grids_of(grid_thw);
  const VisionLayout layout = vision_layout(grids, merge_);

  at::Tensor x = co_await embed(trace, std::move(pixels), grids);
  VisionContext context{layout.cu_seqlens, {}, {}, {}, &layout.segments};
  at::Tensor coordinates = on_device(layout.coordinates, device);
  context = co_await rotary_pos_emb(trace, x, std::move(coordinates), context);

  for (std::size_t i = 0; i < blocks.size(); ++i) {
    x = co_await (*blocks[i])(trace, std::move(x), context);
    if (const Merger* tap = tap_after(i)) {
      features.deepstack.push_back(co_await (*tap)(trace, x));
      x = beyond_its_reader(x);
    }
  }
  features.merged = co_await merger(trace, x);
  x = beyond_its_reader(x);

  std::vector<at::Tensor*> result{&x, &features.merged};
  for (at::Tensor& level : features.deepstack) result.push_back(&level);
  co_await trace.at_all(output, std::move(result));
  co_return features;
}

Qwen3VL::Qwen3VL(const Config& config, Attention attention)
    : VisionLanguageModel(
          config, attention,
          {build_tower<Qwen3VLVision>,
           {build_block<TextLayer<NormedAttention, TextMlp>>, build_norm<RmsNorm>}}) {}

}  // namespace vlscope
