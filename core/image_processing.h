// The pixel arithmetic of the Qwen-VL processors: resize, normalise, cut into patches. The sizes
// are those of core/image_size.h.
//
// The results equal those of the reference's torchvision backend bit for bit: the same ATen resize
// kernel on uint8, the same float32 subtraction and division, the same order of patches. Decoding
// files is left to the caller.
#pragma once

#include <vector>

#include "ATen/core/Tensor.h"
#include "core/image_size.h"

namespace vlscope {

/// Antialiased bicubic resize of uint8 frames [F, 3, H, W]; returned as they are when the size is
/// right.
at::Tensor resize_frames(const at::Tensor& frames, ImageSize size);

/// Normalises uint8 frames [F, 3, H, W] (any strides) and writes their patches to `out`, a
/// contiguous float32 tensor [ceil(F / T) * H / P * W / P, 3 * T * P * P], with P = patch_size and
/// T = temporal_patch_size.
///
/// Rows run over temporal patches, then over merge blocks of merge_size x merge_size patches in
/// row-major order, then inside the block; columns over (channel, frame, y, x). The last frame is
/// repeated to fill the last temporal patch, so a still image is one frame.
void write_patches(const at::Tensor& frames, const ImageOptions& options, const at::Tensor& out);

struct Patches {
  at::Tensor pixel_values;  ///< float32 [sum of t * h * w, 3 * T * P * P]
  at::Tensor grid_thw;      ///< int64 [images or videos, 3], in patches
};

/// The patches of uint8 RGB images [H, W, 3] on the CPU, one after the other; t = 1. Sizes are
/// checked before any image is touched. Throws InputError naming the image by its index.
Patches preprocess_images(const std::vector<at::Tensor>& images, const ImageOptions& options);

/// The same of videos [F, H, W, 3]; t = ceil(F / T).
Patches preprocess_videos(const std::vector<at::Tensor>& videos, const VideoOptions& options);

}  // namespace vlscope
