#include "models/inputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/errors.h"
#include "core/text.h"

namespace vlscope {
namespace {

/// An integer tensor as contiguous int64 on the CPU.
at::Tensor integers(const at::Tensor& tensor, const char* name, std::int64_t dims) {
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    throw InputError(
        fmt::format("{} is {}; give integers.", name, dtype_text(tensor.scalar_type())));
  }
  if (tensor.dim() != dims) {
    throw InputError(fmt::format("{} has shape {}, with {} axes; {} are expected.", name,
                                 shape_text(tensor), tensor.dim(), dims));
  }
  const bool ready = tensor.is_cpu() && tensor.scalar_type() == at::kLong && tensor.is_contiguous();
  return ready ? tensor : tensor.to(at::kCPU, at::kLong).contiguous();
}

void check_ids(const at::Tensor& ids, std::int64_t vocab_size) {
  if (ids.numel() == 0) {
    throw InputError(
        fmt::format("input_ids has shape {}: the prompt is empty. Give one token or "
                    "more.",
                    shape_text(ids)));
  }
  const auto* id = ids.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    if (id[i] >= 0 && id[i] < vocab_size) continue;
    throw InputError(
        fmt::format("input_ids holds {} at row {}, position {}; the vocabulary has ids 0 to {}.",
                    id[i], i / ids.size(1), i % ids.size(1), vocab_size - 1));
  }
}

void check_mask(const at::Tensor& mask, const at::Tensor& ids) {
  if (mask.sizes() != ids.sizes()) {
    throw InputError(fmt::format("attention_mask has shape {}, input_ids {}; give the same shape.",
                                 shape_text(mask), shape_text(ids)));
  }
  const auto* value = mask.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < mask.size(0); ++row, value += mask.size(1)) {
    const auto bad =
        std::find_if(value, value + mask.size(1), [](std::int64_t v) { return v != 0 && v != 1; });
    if (bad != value + mask.size(1)) {
      throw InputError(fmt::format("attention_mask holds {} at row {}, position {}; give 0 or 1.",
                                   *bad, row, bad - value));
    }
    if (std::count(value, value + mask.size(1), 1) == 0) {
      throw InputError(
          fmt::format("attention_mask is 0 on all {} positions of row {}: the prompt is "
                      "empty.",
                      mask.size(1), row));
    }
  }
}

void check_grids(const std::vector<Grid>& grids, const VisionConfig& vision) {
  const std::int64_t merge = vision.spatial_merge_size;
  for (std::size_t i = 0; i < grids.size(); ++i) {
    const auto [frames, rows, columns] = grids[i];
    if (frames == 1 && rows > 0 && columns > 0 && rows % merge == 0 && columns % merge == 0 &&
        rows <= (1 << 20) && columns <= (1 << 20)) {
      continue;
    }
    throw InputError(fmt::format(
        "image_grid_thw of image {} is ({}, {}, {}) patches; an image has 1 frame, and rows and "
        "columns that are positive multiples of {}.",
        i, frames, rows, columns, merge));
  }
}

void check_pixels(const at::Tensor& pixels, const std::vector<Grid>& grids,
                  const VisionConfig& vision) {
  const std::int64_t width =
      vision.in_channels * vision.temporal_patch_size * vision.patch_size * vision.patch_size;
  if (!at::isFloatingType(pixels.scalar_type())) {
    throw InputError(fmt::format("pixel_values is {}; give floating point, as the processor does.",
                                 dtype_text(pixels.scalar_type())));
  }
  if (pixels.dim() != 2 || pixels.size(1) != width) {
    throw InputError(fmt::format(
        "pixel_values has shape {}; [patches, {}] is expected ({} channels x {} frames x {} x {} "
        "pixels).",
        shape_text(pixels), width, vision.in_channels, vision.temporal_patch_size,
        vision.patch_size, vision.patch_size));
  }
  std::int64_t patches = 0;
  for (const Grid& grid : grids) patches += grid.patches();
  if (pixels.size(0) != patches) {
    throw InputError(fmt::format("pixel_values has {} patches, image_grid_thw counts {}.",
                                 pixels.size(0), patches));
  }
}

std::int64_t tokens_of(const Grid& grid, const VisionConfig& vision) {
  return grid.patches() / (vision.spatial_merge_size * vision.spatial_merge_size);
}

void check_placeholders(const at::Tensor& ids, const std::vector<Grid>& grids,
                        const Config& config) {
  const auto* id = ids.const_data_ptr<std::int64_t>();
  const auto count = [&](std::int64_t token) { return std::count(id, id + ids.numel(), token); };
  if (const auto videos = count(config.video_token_id); videos > 0) {
    throw InputError(fmt::format("input_ids holds {} video tokens (id {}); videos are not served.",
                                 videos, config.video_token_id));
  }
  std::int64_t expected = 0;
  for (const Grid& grid : grids) expected += tokens_of(grid, config.vision);
  const auto found = count(config.image_token_id);
  if (found == expected) return;
  throw InputError(fmt::format(
      "input_ids holds {} image tokens (id {}), the {} image(s) give {} features. Each image needs "
      "its placeholder, expanded to rows x columns / {} tokens.",
      found, config.image_token_id, grids.size(), expected,
      config.vision.spatial_merge_size * config.vision.spatial_merge_size));
}

/// Writes the positions of one prompt, walking its tokens and the grids that they refer to.
class PositionWriter {
 public:
  PositionWriter(const std::vector<Grid>& grids, const Config& config)
      : grids_(grids), config_(config), merge_(config.vision.spatial_merge_size) {}

  /// `ids` and `slots`: the unmasked tokens of a prompt and where their positions go.
  void write(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& slots,
             std::int64_t* time, std::int64_t* height, std::int64_t* width) {
    std::int64_t next = 0;
    for (std::size_t i = 0; i < ids.size();) {
      if (ids[i] != config_.image_token_id) {
        time[slots[i]] = height[slots[i]] = width[slots[i]] = next++;
        ++i;
        continue;
      }
      const Grid& grid = take(ids, i);
      const std::int64_t rows = grid.rows / merge_, columns = grid.columns / merge_;
      for (std::int64_t token = 0; token < rows * columns; ++token, ++i) {
        time[slots[i]] = next;
        height[slots[i]] = next + token / columns;
        width[slots[i]] = next + token % columns;
      }
      next += std::max(rows, columns);
    }
  }

 private:
  /// The next grid, whose tokens must be a run starting at `start`.
  const Grid& take(const std::vector<std::int64_t>& ids, std::size_t start) {
    const Grid& grid = grids_.at(used_++);
    const auto run = static_cast<std::size_t>(tokens_of(grid, config_.vision));
    std::size_t end = start;
    while (end < ids.size() && end < start + run && ids[end] == config_.image_token_id) ++end;
    if (end - start < run) {
      throw InputError(
          fmt::format("image {} gives {} features, but the run of image tokens at "
                      "position {} has {}.",
                      used_ - 1, run, start, end - start));
    }
    return grid;
  }

  const std::vector<Grid>& grids_;
  const Config& config_;
  const std::int64_t merge_;
  std::size_t used_ = 0;
};

}  // namespace

std::vector<Grid> grids_of(const at::Tensor& image_grid_thw) {
  std::vector<Grid> grids;
  if (!image_grid_thw.defined()) return grids;
  const auto rows = image_grid_thw.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    grids.push_back({rows[i][0], rows[i][1], rows[i][2]});
  }
  return grids;
}

Inputs checked(Inputs inputs, const Config& config) {
  if (!inputs.input_ids.defined()) throw InputError("input_ids is missing: give a prompt.");
  if (inputs.input_ids.dim() == 1) inputs.input_ids = inputs.input_ids.unsqueeze(0);
  inputs.input_ids = integers(inputs.input_ids, "input_ids", 2);
  check_ids(inputs.input_ids, config.text.vocab_size);

  if (inputs.cache && inputs.past() > 0) return inputs;  // The rest was checked with the prompt.
  if (!inputs.attention_mask.defined()) inputs.attention_mask = at::ones_like(inputs.input_ids);
  if (inputs.attention_mask.dim() == 1) {
    inputs.attention_mask = inputs.attention_mask.unsqueeze(0);
  }
  inputs.attention_mask = integers(inputs.attention_mask, "attention_mask", 2);
  check_mask(inputs.attention_mask, inputs.input_ids);

  if (inputs.pixel_values.defined() != inputs.image_grid_thw.defined()) {
    throw InputError(inputs.pixel_values.defined()
                         ? "pixel_values was given without image_grid_thw: give both."
                         : "image_grid_thw was given without pixel_values: give both.");
  }
  std::vector<Grid> grids;
  if (inputs.image_grid_thw.defined()) {
    inputs.image_grid_thw = integers(inputs.image_grid_thw, "image_grid_thw", 2);
    if (inputs.image_grid_thw.size(1) != 3 || inputs.image_grid_thw.size(0) == 0) {
      throw InputError(fmt::format("image_grid_thw has shape {}; [images, 3] is expected.",
                                   shape_text(inputs.image_grid_thw)));
    }
    grids = grids_of(inputs.image_grid_thw);
    check_grids(grids, config.vision);
    check_pixels(inputs.pixel_values, grids, config.vision);
  }
  check_placeholders(inputs.input_ids, grids, config);
  if (inputs.logits_to_keep < 0) {
    throw InputError(
        fmt::format("logits_to_keep is {}; give 0 (all) or more.", inputs.logits_to_keep));
  }
  inputs.position_ids = mrope_positions(inputs, config);
  return inputs;
}

Inputs generation_prompt(Inputs inputs, const Config& config, std::int64_t capacity) {
  inputs = checked(std::move(inputs), config);
  const at::Tensor last = inputs.attention_mask.select(1, -1);
  if (!last.all().item<bool>()) {
    throw InputError(fmt::format(
        "attention_mask is 0 at the last position of row {}: what is generated follows there. Pad "
        "prompts on the left.",
        last.argmin().item<std::int64_t>()));
  }
  inputs.logits_to_keep = 1;
  const auto blocks = static_cast<std::size_t>(config.text.num_hidden_layers);
  inputs.cache = std::make_shared<KeyValueCache>(blocks, inputs.input_ids.size(1) + capacity);
  return inputs;
}

Inputs following(const Inputs& inputs, const at::Tensor& tokens) {
  Inputs next;
  next.input_ids = tokens.to(at::kCPU, at::kLong).unsqueeze(1);
  next.attention_mask =
      at::cat({inputs.attention_mask, at::ones({tokens.size(0), 1}, at::kLong)}, 1);
  // Text counts on from the largest position so far, on all axes.
  const at::Tensor largest = inputs.position_ids.amax(std::array<std::int64_t, 2>{0, 2});
  next.position_ids = (largest + 1).unsqueeze(1).expand({3, -1, -1});
  next.logits_to_keep = inputs.logits_to_keep;
  next.cache = inputs.cache;
  return next;
}

at::Tensor mrope_positions(const Inputs& inputs, const Config& config) {
  const std::int64_t batch = inputs.input_ids.size(0), seq = inputs.input_ids.size(1);
  const std::vector<Grid> grids = grids_of(inputs.image_grid_thw);
  const at::Tensor positions = at::zeros({3, batch, seq}, at::kLong);
  auto* base = positions.mutable_data_ptr<std::int64_t>();
  const auto* ids = inputs.input_ids.const_data_ptr<std::int64_t>();
  const auto* mask = inputs.attention_mask.const_data_ptr<std::int64_t>();
  PositionWriter writer(grids, config);
  for (std::int64_t row = 0; row < batch; ++row) {
    std::vector<std::int64_t> tokens, slots;
    for (std::int64_t i = row * seq; i < (row + 1) * seq; ++i) {
      if (mask[i] == 0) continue;
      tokens.push_back(ids[i]);
      slots.push_back(i);
    }
    writer.write(tokens, slots, base, base + batch * seq, base + 2 * batch * seq);
  }
  return positions;
}

at::Tensor token_rows(const at::Tensor& input_ids, std::int64_t token_id) {
  return (input_ids.reshape(-1) == token_id).nonzero().squeeze(-1);
}

}  // namespace vlscope
