#include "core/image_size.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/errors.h"

namespace vlscope {
namespace {

constexpr int64_t kMaxAspectRatio = 200;

// These lie far beyond any picture, and keep every product below within 64 bits: a video has at
// most 2^20 frames of 2^40 pixels.
constexpr int64_t kMaxSide = 1 << 20;
constexpr int64_t kMaxFrames = 1 << 20;
constexpr int64_t kMaxMinPixels = int64_t{1} << 40;
constexpr int64_t kMaxPatchSide = 1 << 10;
constexpr int64_t kMaxMergeSide = 1 << 6;
constexpr int64_t kMaxVideoTokens = 1 << 20;

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// A number of frames, and what it counts as where the limits are compared.
struct Duration {
  int64_t frames = 1;
  int64_t counted = 1;
};

void check_aspect_ratio(ImageSize size) {
  const auto [shorter, longer] = std::minmax(size.height, size.width);
  if (longer <= kMaxAspectRatio * shorter) return;
  throw InputError(
      fmt::format("the image is {} pixels high and {} wide, an aspect ratio of {:.6g}; at most {} "
                  "is allowed: crop or pad it",
                  size.height, size.width,
                  static_cast<double>(longer) / static_cast<double>(shorter), kMaxAspectRatio));
}

void check_size(ImageSize size) {
  if (size.height <= 0 || size.width <= 0) {
    throw InputError(
        fmt::format("the image is empty: {} pixels high, {} wide", size.height, size.width));
  }
  if (std::max(size.height, size.width) > kMaxSide) {
    throw InputError(fmt::format("the image is {} pixels high and {} wide; a side has at most {}",
                                 size.height, size.width, kMaxSide));
  }
}

void check_setting(const char* name, int64_t value, int64_t most) {
  if (value <= 0) throw InputError(fmt::format("{} has to be positive, got {}", name, value));
  if (value > most) {
    throw InputError(fmt::format("{} has to be at most {}, got {}", name, most, value));
  }
}

void check_limits(PixelLimits limits) {
  check_setting("min_pixels", limits.min_pixels, kMaxMinPixels);
  check_setting("max_pixels", limits.max_pixels, kUnbounded);
  if (limits.min_pixels > limits.max_pixels) {
    throw InputError(fmt::format("min_pixels {} is larger than max_pixels {}", limits.min_pixels,
                                 limits.max_pixels));
  }
}

// The rule that images (of one frame) and videos share.
ImageSize fit(ImageSize size, int64_t factor, PixelLimits limits, Duration duration) {
  check_aspect_ratio(size);
  const double h = static_cast<double>(size.height);
  const double w = static_cast<double>(size.width);
  const double f = static_cast<double>(factor);
  const double volume = static_cast<double>(duration.frames * size.height * size.width);
  const auto blocks = [factor](double count) { return static_cast<int64_t>(count) * factor; };

  // nearbyint rounds halves to even under the default rounding mode, as Python's round does.
  const ImageSize rounded{blocks(std::nearbyint(h / f)), blocks(std::nearbyint(w / f))};
  const int64_t counted = duration.counted * rounded.height * rounded.width;
  if (counted > limits.max_pixels) {
    const double beta = std::sqrt(volume / static_cast<double>(limits.max_pixels));
    return {std::max(factor, blocks(std::floor(h / beta / f))),
            std::max(factor, blocks(std::floor(w / beta / f)))};
  }
  if (counted < limits.min_pixels) {
    const double beta = std::sqrt(static_cast<double>(limits.min_pixels) / volume);
    return {blocks(std::ceil(h * beta / f)), blocks(std::ceil(w * beta / f))};
  }
  return rounded;
}

// Python's int(limits.min_pixels * 1.05): what a cap on frames never goes below.
int64_t least_pixels(PixelLimits limits) {
  return static_cast<int64_t>(static_cast<double>(limits.min_pixels) * 1.05);
}

ImageSize frame_bound_size(int64_t frames, ImageSize size, const VideoOptions& options) {
  const ImageOptions& each = options.frames;
  const int64_t factor = each.patch_size * each.merge_size;
  PixelLimits limits = each.limits;
  if (options.cap_pixels_per_frame) {
    const auto total =
        static_cast<int64_t>(static_cast<double>(options.max_video_tokens * factor * factor) * 0.9);
    limits.max_pixels =
        std::max(std::min(limits.max_pixels, total * each.temporal_patch_size / frames),
                 least_pixels(limits));
  }
  return fit(size, factor, limits, {});
}

ImageSize volume_bound_size(int64_t frames, ImageSize size, const VideoOptions& options) {
  const ImageOptions& each = options.frames;
  const int64_t factor = each.patch_size * each.merge_size;
  const int64_t depth = each.temporal_patch_size;
  frames = std::max(frames, depth);
  PixelLimits limits = each.limits;
  if (options.cap_pixels_per_frame) {
    const int64_t cap = options.max_video_tokens * factor * factor;
    limits.max_pixels =
        std::max(std::min(cap, limits.max_pixels / frames), least_pixels(limits)) * frames;
  }
  if (size.height < factor || size.width < factor) {
    const double f = static_cast<double>(factor);
    const double h = static_cast<double>(size.height), w = static_cast<double>(size.width);
    const double scale = std::max(f / h, f / w);
    size = {static_cast<int64_t>(h * scale), static_cast<int64_t>(w * scale)};
  }
  const double groups = static_cast<double>(frames) / static_cast<double>(depth);
  return fit(size, factor, limits, {frames, static_cast<int64_t>(std::nearbyint(groups)) * depth});
}

// The size itself, which has to be cut without a rest.
ImageSize unresized(ImageSize size, int64_t factor) {
  if (size.height > 0 && size.width > 0 && size.height % factor == 0 && size.width % factor == 0) {
    return size;
  }
  throw InputError(fmt::format(
      "with do_resize off the sides have to be multiples of {} (patch_size * merge_size), got "
      "{} high and {} wide",
      factor, size.height, size.width));
}

}  // namespace

void check_image_options(const ImageOptions& options) {
  check_setting("patch_size", options.patch_size, kMaxPatchSide);
  check_setting("temporal_patch_size", options.temporal_patch_size, kMaxPatchSide);
  check_setting("merge_size", options.merge_size, kMaxMergeSide);
  check_limits(options.limits);
  if (!(options.rescale_factor > 0) || !std::isfinite(options.rescale_factor)) {
    throw InputError(fmt::format("rescale_factor has to be positive and finite, got {}",
                                 options.rescale_factor));
  }
  for (const double std : options.image_std) {
    if (std == 0) throw InputError("image_std holds a zero, by which pixels cannot be divided");
  }
}

void check_video_options(const VideoOptions& options) {
  check_image_options(options.frames);
  check_setting("max_video_tokens", options.max_video_tokens, kMaxVideoTokens);
}

ImageSize smart_resize(ImageSize size, int64_t factor, PixelLimits limits) {
  check_setting("factor", factor, kMaxPatchSide * kMaxMergeSide);
  check_limits(limits);
  check_size(size);
  return fit(size, factor, limits, {});
}

ImageSize processed_size(ImageSize size, const ImageOptions& options) {
  check_image_options(options);
  const int64_t factor = options.patch_size * options.merge_size;
  return options.do_resize ? smart_resize(size, factor, options.limits) : unresized(size, factor);
}

ImageSize processed_video_size(int64_t frames, ImageSize size, const VideoOptions& options) {
  check_video_options(options);
  const ImageOptions& each = options.frames;
  if (frames <= 0) throw InputError("the video has no frames");
  if (frames > kMaxFrames) {
    throw InputError(
        fmt::format("the video has {} frames, at most {} are possible", frames, kMaxFrames));
  }
  if (!each.do_resize) return unresized(size, each.patch_size * each.merge_size);
  check_size(size);
  return options.bound == VideoBound::kFrame ? frame_bound_size(frames, size, options)
                                             : volume_bound_size(frames, size, options);
}

}  // namespace vlscope
