// What a forward is given, checked, and the index lists that follow from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "models/config.h"
#include "models/grid.h"
#include "models/recording.h"

namespace vlscope {

/// The last positions of a recorded prompt, from `first` on, in several copies.
struct Tail {
  std::int64_t first = 0;
  std::int64_t copies = 1;
};

/// The recordings that a forward has to do with.
struct Replay {
  std::shared_ptr<const Recording> from = nullptr;  ///< Parts that need no computing.
  std::shared_ptr<Recording> into = nullptr;        ///< Filled as the forward goes.
  std::optional<Tail> tail = std::nullopt;          ///< Of `from`: the forward is of that alone.
};

/// The tensors of one forward, as the caller has them.
struct Inputs {
  at::Tensor input_ids;             ///< `[batch, seq]` int64, placeholders expanded
  at::Tensor attention_mask;        ///< `[batch, past + seq]` int64, 1 on tokens and 0 on padding
  at::Tensor pixel_values;          ///< `[patches, channels * frames * side * side]`, or undefined
  at::Tensor pixel_values_videos;   ///< The same of videos.
  at::Tensor image_grid_thw;        ///< `[images, 3]` int64 in patches: frames (1), rows, columns
  at::Tensor video_grid_thw;        ///< `[videos, 3]`: frames are those that the tower sees
  at::Tensor second_per_grid_ts;    ///< `[videos]`: seconds from frame to frame; undefined is 1
  std::int64_t logits_to_keep = 0;  ///< Logits of that many last positions only; 0 is all.
  at::Tensor position_ids;  ///< `[3, batch, seq]` int64, see mrope_positions; made by `checked`
  std::shared_ptr<KeyValueCache> cache = nullptr;  ///< Of a generation; filled by its forwards.

  Replay replay = {};

  /// Positions that earlier steps of a generation have put into the cache.
  std::int64_t past() const {
    return attention_mask.defined() ? attention_mask.size(-1) - input_ids.size(-1) : 0;
  }
};

/// Brings ids, mask and grids to int64 on the CPU, fills in a mask of ones and the positions, and
/// checks everything against the config and against each other.
/// @throws InputError naming what disagrees, before any compute.
Inputs checked(Inputs inputs, const Config& config);

/// Refuses pixels on the meta device, which are enough for a scan and for nothing else.
/// @throws InputError naming them.
void check_pixels_hold_data(const Inputs& inputs);

/// The prompt of a generation: checked, with an empty cache, and with logits of the last position
/// only.
/// @param capacity tokens that may follow the prompt.
/// @throws InputError what `checked` throws, and where a prompt does not end at its last position.
Inputs generation_prompt(Inputs inputs, const Config& config, std::int64_t capacity);

/// The step after `inputs`: the tokens chosen there, `[batch]`, one position further. Images and
/// everything else before are in the cache.
Inputs following(const Inputs& inputs, const at::Tensor& tokens);

/// The rows of `image_grid_thw` or `video_grid_thw`; empty if there is none.
std::vector<Grid> grids_of(const at::Tensor& grid_thw);

/// M-RoPE positions `[3, batch, seq]` (time, height, width), int64, 0 on padding. Text counts up by
/// one on all axes. An image's tokens all take the time position that it starts at; height and
/// width are that start plus row and column in the merged grid; the text after it goes on from the
/// largest of these plus one. VideoTime says what of a video is such a run. Where it is the whole
/// video, its frames' time positions go up from where it starts, by one or by whole seconds times
/// `tokens_per_second`, and the text after it goes on as after an image, whatever the time has come
/// to. Arithmetic of each family's `get_rope_index`, transformers 5.17.0.
/// @throws InputError if a run of image or video tokens does not match its grid.
at::Tensor mrope_positions(const Inputs& inputs, const Config& config);

/// Which tokens are of images, which of videos, `[batch, seq]` bool, and which are of either.
struct VisualTokens {
  at::Tensor images, videos, mask;
};
VisualTokens visual_tokens(const Inputs& inputs, const Config& config);

/// Tensors with a row for each visual token, which the tower gives with the images first, in the
/// order of the prompt's tokens.
std::vector<at::Tensor> in_prompt_order(std::vector<at::Tensor> levels, const VisualTokens& visual);

/// Indices of the true elements of a mask `[batch, seq]` in its flattened form, ascending.
at::Tensor rows_of(const at::Tensor& mask);

}  // namespace vlscope
