#include "core/image_processing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "ATen/Parallel.h"
#include "ATen/ops/_upsample_bicubic2d_aa.h"
#include "ATen/ops/empty.h"
#include "core/errors.h"
#include "fmt/format.h"
#include "fmt/ranges.h"

namespace vlscope {
namespace {

constexpr int64_t kChannels = 3;
constexpr int64_t kMaxAspectRatio = 200;
constexpr int64_t kLevels = 256;

// The float32 value of each of the 256 levels, per channel.
using LevelTable = std::array<std::array<float, kLevels>, kChannels>;

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Rescaling is folded into mean and std as the reference does, so that (v - mean) / std rounds
// alike.
LevelTable level_table(const ImageOptions& options) {
  const float scale = options.do_rescale ? static_cast<float>(1.0 / options.rescale_factor) : 1.0f;
  LevelTable table;
  for (int64_t channel = 0; channel < kChannels; ++channel) {
    const float mean = static_cast<float>(options.image_mean[channel]) * scale;
    const float std = static_cast<float>(options.image_std[channel]) * scale;
    for (int64_t level = 0; level < kLevels; ++level) {
      const float value = static_cast<float>(level);
      if (options.do_normalize) {
        table[channel][level] = (value - mean) / std;
      } else {
        const float factor = options.do_rescale ? static_cast<float>(options.rescale_factor) : 1.0f;
        table[channel][level] = value * factor;
      }
    }
  }
  return table;
}

// Writes the patches of a clip: a cursor over one strided uint8 tensor [F, 3, H, W].
class PatchWriter {
 public:
  PatchWriter(const at::Tensor& frames, const ImageOptions& options)
      : data_(frames.const_data_ptr<uint8_t>()),
        strides_(frames.strides()),
        frame_count_(frames.size(0)),
        patch_(options.patch_size),
        depth_(options.temporal_patch_size),
        merge_(options.merge_size),
        blocks_high_(frames.size(2) / (patch_ * merge_)),
        blocks_wide_(frames.size(3) / (patch_ * merge_)),
        table_(level_table(options)) {}

  int64_t row_length() const { return kChannels * depth_ * patch_ * patch_; }

  // Number of rows of merge blocks, over all temporal patches: the unit of parallel work.
  int64_t block_rows() const { return divide_up(frame_count_, depth_) * blocks_high_; }

  void write_block_row(int64_t index, float* out) const {
    const int64_t group = index / blocks_high_;
    const int64_t block_y = index % blocks_high_;
    out += index * blocks_wide_ * merge_ * merge_ * row_length();
    for (int64_t block_x = 0; block_x < blocks_wide_; ++block_x) {
      for (int64_t y = 0; y < merge_; ++y) {
        for (int64_t x = 0; x < merge_; ++x, out += row_length()) {
          write_patch(group, block_y * merge_ + y, block_x * merge_ + x, out);
        }
      }
    }
  }

 private:
  void write_patch(int64_t group, int64_t patch_y, int64_t patch_x, float* out) const {
    const int64_t area = patch_ * patch_;
    for (int64_t channel = 0; channel < kChannels; ++channel) {
      for (int64_t depth = 0; depth < depth_; ++depth, out += area) {
        const int64_t frame = group * depth_ + depth;
        if (depth > 0 && frame >= frame_count_) {
          std::memcpy(out, out - area, area * sizeof(float));  // the frame before, repeated
        } else {
          const uint8_t* corner = data_ + frame * strides_[0] + channel * strides_[1] +
                                  patch_y * patch_ * strides_[2] + patch_x * patch_ * strides_[3];
          write_plane(corner, table_[channel], out);
        }
      }
    }
  }

  void write_plane(const uint8_t* corner, const std::array<float, kLevels>& levels,
                   float* out) const {
    for (int64_t y = 0; y < patch_; ++y) {
      const uint8_t* row = corner + y * strides_[2];
      for (int64_t x = 0; x < patch_; ++x) *out++ = levels[row[x * strides_[3]]];
    }
  }

  const uint8_t* data_;
  at::IntArrayRef strides_;
  int64_t frame_count_;
  int64_t patch_;
  int64_t depth_;
  int64_t merge_;
  int64_t blocks_high_;
  int64_t blocks_wide_;
  LevelTable table_;
};

void check_image(const at::Tensor& image) {
  if (image.scalar_type() != at::kByte || image.dim() != 3 || image.size(2) != kChannels ||
      !image.device().is_cpu()) {
    throw InputError(fmt::format("expected uint8 pixels [height, width, 3] on the CPU, got {} [{}]",
                                 c10::toString(image.scalar_type()),
                                 fmt::join(image.sizes(), ", ")));
  }
}

// Runs `check` on one image and puts its index before the message of what it throws.
template <typename Check>
auto naming_image(size_t index, Check check) {
  try {
    return check();
  } catch (const InputError& error) {
    throw InputError(fmt::format("image {}: {}", index, error.what()));
  }
}

}  // namespace

void check_image_options(const ImageOptions& options) {
  const auto positive = [](const char* name, int64_t value) {
    if (value <= 0) throw InputError(fmt::format("{} has to be positive, got {}", name, value));
  };
  positive("patch_size", options.patch_size);
  positive("temporal_patch_size", options.temporal_patch_size);
  positive("merge_size", options.merge_size);
  positive("min_pixels", options.limits.min_pixels);
  positive("max_pixels", options.limits.max_pixels);
  if (options.limits.min_pixels > options.limits.max_pixels) {
    throw InputError(fmt::format("min_pixels {} is larger than max_pixels {}",
                                 options.limits.min_pixels, options.limits.max_pixels));
  }
  if (!(options.rescale_factor > 0)) {
    throw InputError(
        fmt::format("rescale_factor has to be positive, got {}", options.rescale_factor));
  }
  for (const double std : options.image_std) {
    if (std == 0) throw InputError("image_std holds a zero, by which pixels cannot be divided");
  }
}

ImageSize smart_resize(ImageSize size, int64_t factor, PixelLimits limits) {
  const auto [height, width] = size;
  if (height <= 0 || width <= 0) {
    throw InputError(fmt::format("the image is empty: {} pixels high, {} wide", height, width));
  }
  const auto [shorter, longer] = std::minmax(height, width);
  if (longer > kMaxAspectRatio * shorter) {
    throw InputError(fmt::format(
        "the image is {} pixels high and {} wide, an aspect ratio of {:.6g}; at most {} "
        "is allowed: crop or pad it",
        height, width, static_cast<double>(longer) / static_cast<double>(shorter),
        kMaxAspectRatio));
  }
  const double h = static_cast<double>(height);
  const double w = static_cast<double>(width);
  const double f = static_cast<double>(factor);
  const auto blocks = [factor](double count) { return static_cast<int64_t>(count) * factor; };

  // nearbyint rounds halves to even under the default rounding mode, as Python's round does.
  const ImageSize rounded{blocks(std::nearbyint(h / f)), blocks(std::nearbyint(w / f))};
  const int64_t area = rounded.height * rounded.width;
  if (area > limits.max_pixels) {
    const double beta = std::sqrt(h * w / static_cast<double>(limits.max_pixels));
    return {std::max(factor, blocks(std::floor(h / beta / f))),
            std::max(factor, blocks(std::floor(w / beta / f)))};
  }
  if (area < limits.min_pixels) {
    const double beta = std::sqrt(static_cast<double>(limits.min_pixels) / (h * w));
    return {blocks(std::ceil(h * beta / f)), blocks(std::ceil(w * beta / f))};
  }
  return rounded;
}

ImageSize processed_size(ImageSize size, const ImageOptions& options) {
  const int64_t factor = options.patch_size * options.merge_size;
  if (options.do_resize) return smart_resize(size, factor, options.limits);
  if (size.height <= 0 || size.width <= 0 || size.height % factor != 0 ||
      size.width % factor != 0) {
    throw InputError(fmt::format(
        "with do_resize off the sides have to be multiples of {} (patch_size * merge_size), got "
        "{} high and {} wide",
        factor, size.height, size.width));
  }
  return size;
}

at::Tensor resize_frames(const at::Tensor& frames, ImageSize size) {
  if (ImageSize{frames.size(2), frames.size(3)} == size) return frames;
  return at::_upsample_bicubic2d_aa(frames, {size.height, size.width}, /*align_corners=*/false,
                                    std::nullopt, std::nullopt);
}

void write_patches(const at::Tensor& frames, const ImageOptions& options, const at::Tensor& out) {
  const PatchWriter writer(frames, options);
  float* const rows = out.mutable_data_ptr<float>();
  at::parallel_for(0, writer.block_rows(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) writer.write_block_row(index, rows);
  });
}

ImagePatches preprocess_images(const std::vector<at::Tensor>& images, const ImageOptions& options) {
  check_image_options(options);
  std::vector<ImageSize> sizes;
  sizes.reserve(images.size());
  ImagePatches result;
  result.image_grid_thw = at::empty({static_cast<int64_t>(images.size()), 3}, at::kLong);
  int64_t* grid = result.image_grid_thw.mutable_data_ptr<int64_t>();
  int64_t rows = 0;
  for (size_t i = 0; i < images.size(); ++i) {
    const ImageSize size = naming_image(i, [&] {
      check_image(images[i]);
      return processed_size({images[i].size(0), images[i].size(1)}, options);
    });
    sizes.push_back(size);
    *grid++ = 1;
    *grid++ = size.height / options.patch_size;
    *grid++ = size.width / options.patch_size;
    rows += grid[-2] * grid[-1];
  }

  const int64_t row_length =
      kChannels * options.temporal_patch_size * options.patch_size * options.patch_size;
  result.pixel_values = at::empty({rows, row_length}, at::kFloat);
  int64_t row = 0;
  for (size_t i = 0; i < images.size(); ++i) {
    // [H, W, 3] seen as one channels-last frame [1, 3, H, W]; nothing is copied.
    const at::Tensor frame = images[i].permute({2, 0, 1}).unsqueeze(0);
    const int64_t patches =
        sizes[i].height / options.patch_size * (sizes[i].width / options.patch_size);
    write_patches(resize_frames(frame, sizes[i]), options,
                  result.pixel_values.narrow(0, row, patches));
    row += patches;
  }
  return result;
}

}  // namespace vlscope
