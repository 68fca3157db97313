// From pixels to visual tokens as plain numbers: how an image or a video is cut into patches, and
// how many vectors of which width the language model gets of it. Nothing is computed on pixels.
#pragma once

#include <cstdint>

#include "core/image_processing.h"

namespace vlscope {

/// What a side in pixels and a number of frames may be: far past any input, and no product
/// overflows.
inline constexpr int64_t kLargestSize = int64_t{1} << 20;

/// The sizes that one image, or the frames of one video, have on their way to the language model.
struct VisualShape {
  ImageSize resized;            ///< In pixels.
  int64_t temporal_groups = 0;  ///< Of temporal_patch_size frames each.
  int64_t repeated_frames = 0;  ///< Copies of the last frame that fill the last group.
  ImageSize grid;               ///< In patches, of one group.
  int64_t patch_positions = 0;  ///< Rows of the vision tower: grid.height * grid.width * groups.
  int64_t visual_tokens = 0;    ///< One for each block of merge_size x merge_size patches.
};

/// An image, which the processor resizes first (processed_size). It is one group, filled by
/// temporal_patch_size - 1 copies.
/// Throws InputError on what processed_size and check_image_options refuse, and on a side over
/// kLargestSize.
VisualShape image_shape(ImageSize size, const ImageOptions& options);

/// A video whose frames were taken and resized already: no limit on its pixels holds. Throws
/// InputError on no frames, on sides that are no multiples of patch_size * merge_size, and on what
/// is over kLargestSize.
VisualShape video_shape(int64_t frames, ImageSize size, const ImageOptions& options);

/// The options with a budget of visual tokens for an image: max_pixels becomes
/// tokens * (patch_size * merge_size)^2. Throws InputError on a budget whose pixels lie under
/// min_pixels or over those of the largest image.
ImageOptions with_token_budget(ImageOptions options, int64_t tokens);

}  // namespace vlscope
