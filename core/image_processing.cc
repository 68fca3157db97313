#include "core/image_processing.h"

#include <array>
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

// One image, or the frames of one video, and the size that it is to have.
struct Clip {
  at::Tensor frames;  // uint8 [F, 3, H, W]
  ImageSize size;
};

void check_pixels(const at::Tensor& pixels, int64_t dims, const char* axes) {
  if (pixels.scalar_type() != at::kByte || pixels.dim() != dims || pixels.size(-1) != kChannels ||
      !pixels.device().is_cpu()) {
    throw InputError(fmt::format("expected uint8 pixels [{}] on the CPU, got {} [{}]", axes,
                                 c10::toString(pixels.scalar_type()),
                                 fmt::join(pixels.sizes(), ", ")));
  }
}

// What `prepare` makes of each tensor; the index is put before the message of what it throws.
template <typename Prepare>
std::vector<Clip> each_clip(const std::vector<at::Tensor>& pixels, const char* noun,
                            Prepare prepare) {
  std::vector<Clip> clips;
  clips.reserve(pixels.size());
  for (size_t i = 0; i < pixels.size(); ++i) {
    try {
      clips.push_back(prepare(pixels[i]));
    } catch (const InputError& error) {
      throw InputError(fmt::format("{} {}: {}", noun, i, error.what()));
    }
  }
  return clips;
}

Patches patches_of(const std::vector<Clip>& clips, const ImageOptions& options) {
  Patches result;
  result.grid_thw = at::empty({static_cast<int64_t>(clips.size()), 3}, at::kLong);
  int64_t* grid = result.grid_thw.mutable_data_ptr<int64_t>();
  std::vector<int64_t> counts;
  int64_t rows = 0;
  for (const Clip& clip : clips) {
    *grid++ = divide_up(clip.frames.size(0), options.temporal_patch_size);
    *grid++ = clip.size.height / options.patch_size;
    *grid++ = clip.size.width / options.patch_size;
    counts.push_back(grid[-3] * grid[-2] * grid[-1]);
    rows += counts.back();
  }
  const int64_t row_length =
      kChannels * options.temporal_patch_size * options.patch_size * options.patch_size;
  result.pixel_values = at::empty({rows, row_length}, at::kFloat);
  int64_t row = 0;
  for (size_t i = 0; i < clips.size(); ++i) {
    write_patches(resize_frames(clips[i].frames, clips[i].size), options,
                  result.pixel_values.narrow(0, row, counts[i]));
    row += counts[i];
  }
  return result;
}

}  // namespace

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

Patches preprocess_images(const std::vector<at::Tensor>& images, const ImageOptions& options) {
  check_image_options(options);
  // [H, W, 3] seen as one channels-last frame [1, 3, H, W]; nothing is copied.
  const auto prepare = [&](const at::Tensor& image) {
    check_pixels(image, 3, "height, width, 3");
    return Clip{image.permute({2, 0, 1}).unsqueeze(0),
                processed_size({image.size(0), image.size(1)}, options)};
  };
  return patches_of(each_clip(images, "image", prepare), options);
}

Patches preprocess_videos(const std::vector<at::Tensor>& videos, const VideoOptions& options) {
  check_video_options(options);
  const auto prepare = [&](const at::Tensor& video) {
    check_pixels(video, 4, "frames, height, width, 3");
    return Clip{video.permute({0, 3, 1, 2}),
                processed_video_size(video.size(0), {video.size(1), video.size(2)}, options)};
  };
  return patches_of(each_clip(videos, "video", prepare), options.frames);
}

}  // namespace vlscope
