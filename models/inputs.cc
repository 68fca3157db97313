#include "models/inputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "core/device.h"
#include "core/errors.h"
#include "core/text.h"
#include "models/tail.h"

namespace vlscope {
namespace {

constexpr std::int64_t kNoToken = -1;

/// Refuses a tensor whose numbers cannot be read one by one.
void check_dense(const at::Tensor& tensor, const char* name) {
  if (tensor.layout() == at::kStrided && !tensor.is_nested()) return;
  throw InputError(fmt::format("{} is sparse or nested; give a dense tensor.", name));
}

void check_data(const at::Tensor& tensor, const char* name) {
  if (!tensor.is_meta()) return;
  throw InputError(fmt::format(
      "{} is on meta, which holds shapes alone; give it on cpu or the model's device.", name));
}

/// An integer tensor as contiguous int64 on the CPU.
at::Tensor integers(const at::Tensor& tensor, const char* name, std::int64_t dims,
                    bool include_bool = false) {
  check_dense(tensor, name);
  check_data(tensor, name);
  if (!at::isIntegralType(tensor.scalar_type(), include_bool)) {
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

/// What the messages call the tensors of images and those of videos.
struct Modality {
  const char* noun;
  const char* pixels;
  const char* grids;
  const char* frames;  ///< How many frames a grid may have.
};
constexpr Modality kImage{"image", "pixel_values", "image_grid_thw", "an image has 1 frame"};
constexpr Modality kVideo{"video", "pixel_values_videos", "video_grid_thw",
                          "a video has 1 frame or more"};

constexpr std::int64_t kLargestSide = 1 << 20;

void check_grids(const std::vector<Grid>& grids, const VisionConfig& vision,
                 const Modality& modality) {
  const std::int64_t merge = vision.spatial_merge_size;
  const std::int64_t most_frames = &modality == &kImage ? 1 : kLargestSide;
  const auto side_fits = [merge](std::int64_t side) {
    return side > 0 && side % merge == 0 && side <= kLargestSide;
  };
  for (std::size_t i = 0; i < grids.size(); ++i) {
    const auto [frames, rows, columns] = grids[i];
    if (frames >= 1 && frames <= most_frames && side_fits(rows) && side_fits(columns)) continue;
    throw InputError(fmt::format(
        "{} of {} {} is ({}, {}, {}) patches; {}, and rows and columns that are positive multiples "
        "of {}.",
        modality.grids, modality.noun, i, frames, rows, columns, modality.frames, merge));
  }
}

bool is_pixel_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

void check_finite(const at::Tensor& pixels, const Modality& modality) {
  const auto [least, most] = at::aminmax(pixels);  // Both are NaN where any number is.
  if (std::isfinite(least.item<double>()) && std::isfinite(most.item<double>())) return;
  const at::Tensor first = at::isfinite(pixels).logical_not_().nonzero()[0];
  const auto patch = first[0].item<std::int64_t>(), column = first[1].item<std::int64_t>();
  throw InputError(fmt::format("{} holds {} at patch {}, column {}; give finite numbers.",
                               modality.pixels, pixels[patch][column].item<double>(), patch,
                               column));
}

void check_pixels(const at::Tensor& pixels, const std::vector<Grid>& grids,
                  const VisionConfig& vision, const Modality& modality) {
  const std::int64_t width =
      vision.in_channels * vision.temporal_patch_size * vision.patch_size * vision.patch_size;
  check_dense(pixels, modality.pixels);
  if (!is_pixel_dtype(pixels.scalar_type())) {
    throw InputError(fmt::format("{} is {}; give floating point, as the processor does.",
                                 modality.pixels, dtype_text(pixels.scalar_type())));
  }
  if (pixels.dim() != 2 || pixels.size(1) != width) {
    throw InputError(fmt::format(
        "{} has shape {}; [patches, {}] is expected ({} channels x {} frames x {} x {} pixels).",
        modality.pixels, shape_text(pixels), width, vision.in_channels, vision.temporal_patch_size,
        vision.patch_size, vision.patch_size));
  }
  const std::int64_t patches = patches_of(grids);
  if (pixels.size(0) != patches) {
    throw InputError(fmt::format("{} has {} patches, {} counts {}.", modality.pixels,
                                 pixels.size(0), modality.grids, patches));
  }
  if (!pixels.is_meta()) check_finite(pixels.detach(), modality);
}

/// Brings the grids to int64 and checks them and the pixels. Returns the grids.
std::vector<Grid> check_visual(const at::Tensor& pixels, at::Tensor& grid_thw,
                               const VisionConfig& vision, const Modality& modality) {
  if (pixels.defined() != grid_thw.defined()) {
    const char *given = modality.pixels, *missing = modality.grids;
    if (grid_thw.defined()) std::swap(given, missing);
    throw InputError(fmt::format("{} was given without {}: give both.", given, missing));
  }
  if (!grid_thw.defined()) return {};
  grid_thw = integers(grid_thw, modality.grids, 2);
  if (grid_thw.size(1) != 3 || grid_thw.size(0) == 0) {
    throw InputError(fmt::format("{} has shape {}; [{}s, 3] is expected.", modality.grids,
                                 shape_text(grid_thw), modality.noun));
  }
  std::vector<Grid> grids = grids_of(grid_thw);
  check_grids(grids, vision, modality);
  check_pixels(pixels, grids, vision, modality);
  return grids;
}

std::int64_t tokens_of(const Grid& grid, const VisionConfig& vision) {
  return grid.patches() / (vision.spatial_merge_size * vision.spatial_merge_size);
}

void check_placeholders(const at::Tensor& ids, std::int64_t token, const std::vector<Grid>& grids,
                        const VisionConfig& vision, const Modality& modality) {
  const auto* id = ids.const_data_ptr<std::int64_t>();
  const auto found = std::count(id, id + ids.numel(), token);
  const std::int64_t merged = vision.spatial_merge_size * vision.spatial_merge_size;
  const std::int64_t expected = patches_of(grids) / merged;
  if (found == expected) return;
  throw InputError(fmt::format(
      "input_ids holds {0} {1} tokens (id {2}), the {3} {1}(s) give {4} features. Each {1} needs "
      "its placeholder, expanded to {5}rows x columns / {6} tokens.",
      found, modality.noun, token, grids.size(), expected, &modality == &kVideo ? "frames x " : "",
      merged));
}

/// A run of image or video tokens, how many they are, and how far apart in time its frames are.
struct Run {
  Grid grid;
  std::int64_t tokens;
  std::int64_t interval;
};

/// The runs of one kind of placeholder that the grids ask for, in order.
class Runs {
 public:
  Runs(std::int64_t token, std::vector<Grid> grids, const Modality& modality)
      : token_(token), grids_(std::move(grids)), modality_(modality) {}

  /// The same where a grid is one run, with the distance in time of the frames of each.
  Runs(std::int64_t token, std::vector<Grid> grids, const Modality& modality,
       std::vector<std::int64_t> intervals)
      : Runs(token, std::move(grids), modality) {
    intervals_ = std::move(intervals);
  }

  std::int64_t token() const { return token_; }

  /// The next run, whose tokens must stand at the start of `ids`, which is position `start` of the
  /// prompt. `mask` is that of the same tokens.
  Run take(std::span<const std::int64_t> ids, std::span<const std::int64_t> mask, std::size_t start,
           const VisionConfig& vision) {
    Run run{grids_.at(grid_), 0, intervals_.empty() ? 1 : intervals_.at(grid_)};
    if (intervals_.empty()) run.grid.frames = 1;
    run.tokens = tokens_of(run.grid, vision);
    const auto wanted = ids.first(std::min(ids.size(), static_cast<std::size_t>(run.tokens)));
    const auto found = std::find_if(wanted.begin(), wanted.end(),
                                    [this](std::int64_t id) { return id != token_; }) -
                       wanted.begin();
    if (found < run.tokens) {
      throw InputError(
          fmt::format("{} gives {} features, but the run of {} tokens at position {} has {}.",
                      name(), run.tokens, modality_.noun, start, found));
    }
    const auto hidden = std::count(mask.begin(), mask.begin() + found, 0);
    if (hidden != 0 && hidden != found) {
      throw InputError(fmt::format(
          "attention_mask is 0 on {} of the {} tokens of {} at position {}; hide all of "
          "them or none.",
          hidden, found, name(), start));
    }
    frame_ += run.grid.frames;
    if (frame_ == grids_[grid_].frames) {
      ++grid_;
      frame_ = 0;
    }
    return run;
  }

 private:
  /// What the next run is of: "image 2", "frame 0 of video 1".
  std::string name() const {
    const bool part = &modality_ == &kVideo && intervals_.empty();
    return fmt::format("{}{} {}", part ? fmt::format("frame {} of ", frame_) : "", modality_.noun,
                       grid_);
  }

  const std::int64_t token_;
  const std::vector<Grid> grids_;
  const Modality& modality_;
  std::vector<std::int64_t> intervals_;  ///< Empty where each frame is a run of its own.
  std::size_t grid_ = 0;
  std::int64_t frame_ = 0;
};

Runs video_runs(const Inputs& inputs, const Config& config) {
  std::vector<Grid> grids = grids_of(inputs.video_grid_thw);
  if (config.vision.video_time == VideoTime::kByText) {
    return {config.video_token_id, std::move(grids), kVideo};
  }
  std::vector<std::int64_t> intervals(grids.size(), 1);
  if (config.vision.video_time == VideoTime::kBySecond) {
    for (std::size_t i = 0; i < grids.size(); ++i) {
      // The reference drops the fraction of a second, and takes a second where none are given.
      const double seconds =
          inputs.second_per_grid_ts.defined()
              ? inputs.second_per_grid_ts[static_cast<std::int64_t>(i)].item<double>()
              : 1;
      intervals[i] = config.vision.tokens_per_second * static_cast<std::int64_t>(seconds);
    }
  }
  return {config.video_token_id, std::move(grids), kVideo, std::move(intervals)};
}

/// Writes the positions of one prompt, walking its tokens and the grids that they refer to.
class PositionWriter {
 public:
  PositionWriter(const Inputs& inputs, const Config& config)
      : vision_(config.vision),
        images_(config.image_token_id, grids_of(inputs.image_grid_thw), kImage),
        videos_(video_runs(inputs, config)) {}

  /// The positions of one prompt on each axis; where it is masked, the zeros stay.
  void write(std::span<const std::int64_t> ids, std::span<const std::int64_t> mask,
             std::int64_t* time, std::int64_t* height, std::int64_t* width) {
    const std::int64_t merge = vision_.spatial_merge_size;
    std::int64_t next = 0;
    for (std::size_t i = 0; i < ids.size();) {
      Runs* runs = ids[i] == images_.token()   ? &images_
                   : ids[i] == videos_.token() ? &videos_
                                               : nullptr;
      if (!runs) {
        if (mask[i] != 0) time[i] = height[i] = width[i] = next++;
        ++i;
        continue;
      }
      const auto [grid, tokens, interval] = runs->take(ids.subspan(i), mask.subspan(i), i, vision_);
      if (mask[i] == 0) {
        i += static_cast<std::size_t>(tokens);
        continue;
      }
      const std::int64_t rows = grid.rows / merge, columns = grid.columns / merge;
      for (std::int64_t token = 0; token < tokens; ++token, ++i) {
        time[i] = next + token / (rows * columns) * interval;
        height[i] = next + token / columns % rows;
        width[i] = next + token % columns;
      }
      next += std::max(rows, columns);
    }
  }

 private:
  const VisionConfig& vision_;
  Runs images_, videos_;
};

/// Brings the seconds between the frames of videos to the CPU and checks them.
void check_seconds(at::Tensor& seconds, const std::vector<Grid>& videos, const Config& config) {
  if (!seconds.defined()) return;
  if (config.vision.video_time != VideoTime::kBySecond) {
    throw InputError(fmt::format(
        "second_per_grid_ts was given, but {} does not count the time of a video in seconds: leave "
        "it out.",
        config.model_type));
  }
  if (seconds.dim() != 1 || seconds.size(0) != static_cast<std::int64_t>(videos.size())) {
    throw InputError(
        fmt::format("second_per_grid_ts has shape {}, but there are {} videos; give one number for "
                    "each.",
                    shape_text(seconds), videos.size()));
  }
  check_dense(seconds, "second_per_grid_ts");
  check_data(seconds, "second_per_grid_ts");
  if (seconds.is_complex()) throw InputError("second_per_grid_ts is complex; give real numbers.");
  seconds = seconds.cpu();
  for (std::int64_t i = 0; i < seconds.size(0); ++i) {
    const double second = seconds[i].item<double>();
    if (second >= 0 && second < static_cast<double>(kLargestSide)) continue;
    throw InputError(
        fmt::format("second_per_grid_ts of video {} is {}; give the seconds from one of its frames "
                    "to the next.",
                    i, second));
  }
}

/// A recording comes from a file as well, and is trusted by the forward.
void check_recording(const Recording& recording, const Inputs& inputs, const Config& config) {
  const auto blocks = static_cast<std::size_t>(config.text.num_hidden_layers);
  const auto expect = [](bool right, const char* what, std::size_t found, std::size_t expected) {
    if (right) return;
    throw InputError(fmt::format("the recording has {} {}, but {} are expected: record it again.",
                                 found, what, expected));
  };
  expect(recording.streams.size() == blocks + 1, "streams", recording.streams.size(), blocks + 1);
  const std::array<std::int64_t, 3> shape{inputs.input_ids.size(0), inputs.input_ids.size(1),
                                          config.text.hidden_size};
  for (const at::Tensor& stream : recording.streams) {
    if (stream.sizes() == at::IntArrayRef(shape)) continue;
    throw InputError(
        fmt::format("the recording has a stream of shape {}, but its inputs ask for [{}].",
                    shape_text(stream), fmt::join(shape, ", ")));
  }
  const bool visual = inputs.pixel_values.defined() || inputs.pixel_values_videos.defined();
  const std::size_t levels = visual ? config.vision.deepstack_visual_indexes.size() : 0;
  expect(recording.vision.merged.defined() == visual, "sets of visual features",
         recording.vision.merged.defined(), visual);
  expect(recording.vision.deepstack.size() == levels, "DeepStack levels",
         recording.vision.deepstack.size(), levels);
  const std::size_t keys = recording.keys ? recording.keys->size() : blocks;
  expect(keys == blocks, "blocks with keys", keys, blocks);
}

}  // namespace

std::vector<Grid> grids_of(const at::Tensor& grid_thw) {
  std::vector<Grid> grids;
  if (!grid_thw.defined()) return grids;
  const auto rows = grid_thw.accessor<std::int64_t, 2>();
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
  inputs.attention_mask =
      integers(inputs.attention_mask, "attention_mask", 2, /*include_bool=*/true);
  check_mask(inputs.attention_mask, inputs.input_ids);

  const VisionConfig& vision = config.vision;
  const auto images = check_visual(inputs.pixel_values, inputs.image_grid_thw, vision, kImage);
  const auto videos =
      check_visual(inputs.pixel_values_videos, inputs.video_grid_thw, vision, kVideo);
  check_placeholders(inputs.input_ids, config.image_token_id, images, vision, kImage);
  check_placeholders(inputs.input_ids, config.video_token_id, videos, vision, kVideo);
  check_seconds(inputs.second_per_grid_ts, videos, config);
  if (inputs.logits_to_keep < 0) {
    throw InputError(
        fmt::format("logits_to_keep is {}; give 0 (all) or more.", inputs.logits_to_keep));
  }
  if (inputs.replay.from) check_recording(*inputs.replay.from, inputs, config);
  if (inputs.replay.tail) check_tail(*inputs.replay.tail, inputs, config);
  inputs.position_ids = mrope_positions(inputs, config);
  return inputs;
}

void check_pixels_hold_data(const Inputs& inputs) {
  if (inputs.pixel_values.defined()) check_data(inputs.pixel_values, kImage.pixels);
  if (inputs.pixel_values_videos.defined()) check_data(inputs.pixel_values_videos, kVideo.pixels);
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
  // As the reference's generate does: one further than the last token on each axis, even where a
  // video's time has come to more.
  next.position_ids = inputs.position_ids.narrow(2, inputs.position_ids.size(2) - 1, 1) + 1;
  next.logits_to_keep = inputs.logits_to_keep;
  next.cache = inputs.cache;
  return next;
}

at::Tensor mrope_positions(const Inputs& inputs, const Config& config) {
  const std::int64_t batch = inputs.input_ids.size(0), seq = inputs.input_ids.size(1);
  const at::Tensor positions = at::zeros({3, batch, seq}, at::kLong);
  auto* base = positions.mutable_data_ptr<std::int64_t>();
  const auto* ids = inputs.input_ids.const_data_ptr<std::int64_t>();
  const auto* mask = inputs.attention_mask.const_data_ptr<std::int64_t>();
  PositionWriter writer(inputs, config);
  for (std::int64_t row = 0; row < batch; ++row, ids += seq, mask += seq, base += seq) {
    const auto length = static_cast<std::size_t>(seq);
    writer.write({ids, length}, {mask, length}, base, base + batch * seq, base + 2 * batch * seq);
  }
  return positions;
}

VisualTokens visual_tokens(const Inputs& inputs, const Config& config) {
  const bool prompt = inputs.past() == 0;  // What a later step reads is text, whatever its id.
  VisualTokens tokens;
  tokens.images = inputs.input_ids == (prompt ? config.image_token_id : kNoToken);
  tokens.videos = inputs.input_ids == (prompt ? config.video_token_id : kNoToken);
  tokens.mask = tokens.images.logical_or(tokens.videos);
  return tokens;
}

std::vector<at::Tensor> in_prompt_order(std::vector<at::Tensor> levels,
                                        const VisualTokens& visual) {
  const at::Tensor images = rows_of(visual.images), videos = rows_of(visual.videos);
  if (images.numel() == 0 || videos.numel() == 0) return levels;
  const at::Tensor order = at::argsort(at::cat({images, videos}));
  for (at::Tensor& level : levels) level = level.index_select(0, on_device(order, level.device()));
  return levels;
}

at::Tensor rows_of(const at::Tensor& mask) { return mask.reshape(-1).nonzero().squeeze(-1); }

}  // namespace vlscope
