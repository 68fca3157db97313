#include "models/tail.h"

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/device.h"
#include "core/errors.h"

namespace vlscope {
namespace {

/// The positions of `x` from `first` on, along `axis`, once for each copy along `batch`.
at::Tensor rows(const at::Tensor& x, const Tail& tail, std::int64_t batch, std::int64_t axis) {
  const at::Tensor left = x.narrow(axis, tail.first, x.size(axis) - tail.first);
  auto shape = left.sizes().vec();
  shape[batch] = tail.copies;
  return left.expand(shape);
}

/// The part of the recording that the blocks go by.
std::shared_ptr<const Recording> streams_of(const Recording& whole, const Tail& tail) {
  const auto recording = std::make_shared<Recording>();
  for (const at::Tensor& stream : whole.streams) {
    recording->streams.push_back(rows(stream, tail, 0, 1));
  }
  return recording;
}

bool carries_state(const Config& config) {
  const auto& mixers = config.text.mixers;
  return std::find(mixers.begin(), mixers.end(), Mixer::kLinearAttention) != mixers.end();
}

}  // namespace

void check_tail(const Tail& tail, const Inputs& inputs, const Config& config) {
  const std::int64_t batch = inputs.input_ids.size(0), seq = inputs.input_ids.size(1);
  if (batch != 1) {
    throw InputError(fmt::format(
        "the recording is of a batch of {} prompts; a tail is of one: record it alone.", batch));
  }
  if (tail.first < 0 || tail.first >= seq) {
    throw InputError(fmt::format("the tail begins at position {}; the prompt has {}, 0 to {}.",
                                 tail.first, seq, seq - 1));
  }
  if (tail.copies < 1) {
    throw InputError(
        fmt::format("a tail of {} copies was asked for; take 1 or more.", tail.copies));
  }
  if (tail.first == 0) return;
  if (carries_state(config)) {
    throw InputError(
        fmt::format("the tail begins at position {}, but {} has blocks that carry a state from "
                    "token to token, which is recorded at the end alone: begin at 0.",
                    tail.first, config.model_type));
  }
  if (!inputs.replay.from->keys) {
    throw InputError(
        fmt::format("the tail begins at position {}, and the recording has no keys of what comes "
                    "before: record with keys=True, or begin at 0.",
                    tail.first));
  }
}

TextModel::Input tail_of(const Inputs& inputs, const Config& config, bool deepstack) {
  const Tail& tail = *inputs.replay.tail;
  const Recording& recorded = *inputs.replay.from;
  TextModel::Input in;
  in.replay.from = streams_of(recorded, tail);
  in.inputs_embeds = in.replay.from->streams.front().clone(at::MemoryFormat::Contiguous);
  const at::Device device = in.inputs_embeds.device();
  in.attention_mask = inputs.attention_mask.expand({tail.copies, -1});
  in.position_ids = on_device(rows(inputs.position_ids, tail, 1, 2), device);
  if (tail.first > 0) in.before = recorded.keys;
  // Behind a prompt that is padded on the right, the last token is not the last position.
  const at::Tensor ends = inputs.attention_mask.select(1, inputs.attention_mask.size(1) - 1);
  in.last_alone = inputs.logits_to_keep == 1 && ends.all().item<bool>();
  if (!deepstack || recorded.vision.deepstack.empty()) return in;

  const VisualTokens visual = visual_tokens(inputs, config);
  const std::int64_t passed = visual.mask.narrow(1, 0, tail.first).sum().item<std::int64_t>();
  in.visual_pos_masks = rows(visual.mask, tail, 0, 1).contiguous();
  in.visual_rows = on_device(rows_of(in.visual_pos_masks), device);
  for (const at::Tensor& level : in_prompt_order(recorded.vision.deepstack, visual)) {
    const at::Tensor left = level.narrow(0, passed, level.size(0) - passed);
    in.deepstack.push_back(left.repeat({tail.copies, 1}));
  }
  return in;
}

}  // namespace vlscope
