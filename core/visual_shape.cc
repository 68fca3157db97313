#include "core/visual_shape.h"

#include "core/errors.h"
#include "fmt/format.h"

namespace vlscope {
namespace {

int64_t token_side(const ImageOptions& options) { return options.patch_size * options.merge_size; }

void check_largest(const char* what, int64_t value, int64_t largest = kLargestSize) {
  if (value > largest) {
    throw InputError(fmt::format("{} is {}; at most {} is counted", what, value, largest));
  }
}

VisualShape shape_of(int64_t frames, ImageSize size, const ImageOptions& options) {
  const int64_t depth = options.temporal_patch_size;
  VisualShape shape{.resized = size};
  shape.temporal_groups = (frames + depth - 1) / depth;
  shape.repeated_frames = shape.temporal_groups * depth - frames;
  shape.grid = {size.height / options.patch_size, size.width / options.patch_size};
  shape.patch_positions = shape.temporal_groups * shape.grid.height * shape.grid.width;
  shape.visual_tokens = shape.patch_positions / (options.merge_size * options.merge_size);
  return shape;
}

}  // namespace

VisualShape image_shape(ImageSize size, const ImageOptions& options) {
  check_image_options(options);
  check_largest("height", size.height);
  check_largest("width", size.width);
  return shape_of(1, processed_size(size, options), options);
}

VisualShape video_shape(int64_t frames, ImageSize size, const ImageOptions& options) {
  check_image_options(options);
  check_largest("height", size.height);
  check_largest("width", size.width);
  check_largest("frames", frames);
  if (frames <= 0) throw InputError(fmt::format("the video has {} frames; give 1 or more", frames));
  const int64_t side = token_side(options);
  if (size.height <= 0 || size.width <= 0 || size.height % side != 0 || size.width % side != 0) {
    throw InputError(
        fmt::format("the frames of a video are taken as they were resized: their sides have to be "
                    "multiples of {} (patch_size * merge_size), got {} high and {} wide",
                    side, size.height, size.width));
  }
  return shape_of(frames, size, options);
}

ImageOptions with_token_budget(ImageOptions options, int64_t tokens) {
  check_image_options(options);
  const int64_t area = token_side(options) * token_side(options);
  check_largest("budget", tokens, kLargestSize * kLargestSize / area);
  const int64_t least = (options.limits.min_pixels + area - 1) / area;
  if (tokens < least) {
    throw InputError(
        fmt::format("a budget of {} visual tokens allows {} pixels, and images have at least {} "
                    "(min_pixels): give {} tokens or more",
                    tokens, tokens * area, options.limits.min_pixels, least));
  }
  options.limits.max_pixels = tokens * area;
  return options;
}

}  // namespace vlscope
