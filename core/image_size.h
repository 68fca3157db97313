// The sizes at which the Qwen-VL processors cut images and videos into patches: arithmetic on whole
// numbers, apart from any pixel.
#pragma once

#include <array>
#include <cstdint>

namespace vlscope {

struct ImageSize {
  int64_t height = 0;
  int64_t width = 0;
  bool operator==(const ImageSize&) const = default;
};

/// Bounds on height * width after resizing. The family's files call them size.shortest_edge and
/// size.longest_edge, though they count pixels.
struct PixelLimits {
  int64_t min_pixels = 56 * 56;
  int64_t max_pixels = 28 * 28 * 1280;
};

/// What preprocessor_config.json says; the defaults are those of the reference's class.
struct ImageOptions {
  int64_t patch_size = 14;
  int64_t temporal_patch_size = 2;
  int64_t merge_size = 2;
  PixelLimits limits;
  bool do_resize = true;
  bool do_rescale = true;
  bool do_normalize = true;
  double rescale_factor = 1.0 / 255.0;
  std::array<double, 3> image_mean = {0.48145466, 0.4578275, 0.40821073};
  std::array<double, 3> image_std = {0.26862954, 0.26130258, 0.27577711};
};

/// What the pixel limits of a video bound.
enum class VideoBound {
  kVolume,  ///< frames * height * width, as Qwen3-VL does.
  kFrame,   ///< height * width, as Qwen2-VL and Qwen2.5-VL do.
};

/// What video_preprocessor_config.json says; the defaults are those of the reference's class for
/// Qwen3-VL. Which frames are taken is the caller's business.
struct VideoOptions {
  ImageOptions frames = {.patch_size = 16,
                         .limits = {128 * 32 * 32, 32 * 32 * 768},
                         .image_mean = {0.5, 0.5, 0.5},
                         .image_std = {0.5, 0.5, 0.5}};
  VideoBound bound = VideoBound::kVolume;
  /// Bounds each frame as well: under kVolume by max_video_tokens, and by an even share of
  /// max_pixels; under kFrame by an even share of 90% of max_video_tokens.
  bool cap_pixels_per_frame = false;
  int64_t max_video_tokens = 768;
};

/// Throws InputError unless every size is positive and none absurd, 0 < min_pixels <= max_pixels,
/// and no std is zero. The functions below check what they are given in the same way.
void check_image_options(const ImageOptions& options);
void check_video_options(const VideoOptions& options);

/// The size nearest to `size` whose sides are multiples of `factor` and whose area lies within the
/// limits, keeping the aspect ratio as far as that allows. Halves round to even and all arithmetic
/// is in double, as in the reference (Python's round). A thin image may exceed max_pixels: no side
/// falls under one factor. Throws InputError on an empty image and on an aspect ratio over 200
/// (exactly 200 is allowed).
ImageSize smart_resize(ImageSize size, int64_t factor, PixelLimits limits);

/// The size at which an image is cut into patches: smart_resize, or `size` itself when do_resize is
/// off, which then has to be a multiple of patch_size * merge_size (InputError).
ImageSize processed_size(ImageSize size, const ImageOptions& options);

/// The size at which the frames of a video are cut into patches: smart_resize with the limits on
/// what `bound` says. Under kVolume a side under one factor is first scaled up to it, and fewer
/// frames than a temporal patch has count as that many, as the last one is repeated to fill it.
/// Throws InputError on no frames, on empty ones and on an aspect ratio over 200.
ImageSize processed_video_size(int64_t frames, ImageSize size, const VideoOptions& options);

}  // namespace vlscope
