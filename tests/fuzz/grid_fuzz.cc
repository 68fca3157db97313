// The sizes of images and videos, and the grids that they are cut into: whole merge blocks of
// patches, counted without overflow, or an InputError.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/errors.h"
#include "core/image_size.h"
#include "models/grid.h"
#include "tests/fuzz/expect.h"

namespace vlscope {
namespace {

/// Numbers out of the fuzzer's bytes; zeros behind their end.
class Numbers {
 public:
  Numbers(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  /// Of a width that the bytes choose too: small numbers are as likely as large ones.
  std::int64_t next() {
    const std::size_t width = 1 + take(1) % 8;
    return static_cast<std::int64_t>(take(width));
  }

  bool flag() { return take(1) % 2 != 0; }

 private:
  std::uint64_t take(std::size_t width) {
    std::uint64_t value = 0;
    const std::size_t taken = std::min(width, size_);
    if (taken > 0) std::memcpy(&value, data_, taken);
    data_ += taken;
    size_ -= taken;
    return value;
  }

  const std::uint8_t* data_;
  std::size_t size_;
};

ImageOptions options_of(Numbers& numbers) {
  ImageOptions options;
  options.patch_size = numbers.next();
  options.temporal_patch_size = numbers.next();
  options.merge_size = numbers.next();
  options.limits = {numbers.next(), numbers.next()};
  options.do_resize = numbers.flag();
  return options;
}

/// @param frames of the grid: temporal patches.
void check_cut(ImageSize size, const ImageOptions& options, std::int64_t frames) {
  const std::int64_t factor = options.patch_size * options.merge_size;
  expect(size.height > 0 && size.width > 0, "no side is empty");
  expect(options.patch_size > 0 && factor > 0, "no patch is empty");
  expect(size.height % factor == 0 && size.width % factor == 0, "sides are whole merge blocks");
  const Grid grid{frames, size.height / options.patch_size, size.width / options.patch_size};
  const __int128 most = std::numeric_limits<std::int64_t>::max();
  __int128 patches = static_cast<__int128>(grid.frames) * grid.rows;
  // Three numbers of 63 bits may leave 128 as well.
  patches =
      __builtin_mul_overflow(patches, grid.columns, &patches) ? most : std::min(patches, most);
  expect(grid.patches() == patches, "patches are counted exactly, up to a limit");
  expect(patches_of({grid, grid, grid}) == std::min(3 * patches, most), "and so are their sums");
}

void image(Numbers& numbers) {
  const ImageOptions options = options_of(numbers);
  const ImageSize size{numbers.next(), numbers.next()};
  check_cut(processed_size(size, options), options, 1);
}

void video(Numbers& numbers) {
  VideoOptions options;
  options.frames = options_of(numbers);
  options.bound = numbers.flag() ? VideoBound::kFrame : VideoBound::kVolume;
  options.cap_pixels_per_frame = numbers.flag();
  options.max_video_tokens = numbers.next();
  const std::int64_t frames = numbers.next();
  const ImageSize size{numbers.next(), numbers.next()};
  const ImageSize cut = processed_video_size(frames, size, options);  // refuses a patch of nothing
  check_cut(cut, options.frames, (frames - 1) / options.frames.temporal_patch_size + 1);
}

}  // namespace
}  // namespace vlscope

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  vlscope::Numbers numbers(data, size);
  try {
    if (numbers.flag()) {
      vlscope::video(numbers);
    } else {
      vlscope::image(numbers);
    }
  } catch (const vlscope::InputError&) {
  }
  return 0;
}
