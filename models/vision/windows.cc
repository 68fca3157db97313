#include "models/vision/windows.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "models/vision/layout.h"

namespace vlscope {
namespace {

/// Collects the tokens of one frame after another, window by window.
class Windows {
 public:
  Windows(std::int64_t merge, std::int64_t side) : merge_(merge), side_(side) {}

  void add_frame(std::int64_t rows, std::int64_t columns) {
    const auto first = static_cast<std::int64_t>(order.size());
    for (std::int64_t top = 0; top < rows; top += side_) {
      for (std::int64_t left = 0; left < columns; left += side_) {
        const std::int64_t bottom = std::min(top + side_, rows);
        const std::int64_t right = std::min(left + side_, columns);
        segments.push_back((bottom - top) * (right - left) * merge_ * merge_);
        for (std::int64_t row = top; row < bottom; ++row) {
          for (std::int64_t column = left; column < right; ++column) {
            order.push_back(first + row * columns + column);
          }
        }
      }
    }
  }

  std::vector<std::int64_t> order, segments;

 private:
  std::int64_t merge_, side_;
};

}  // namespace

WindowLayout window_layout(const std::vector<Grid>& grids, std::int64_t merge, std::int64_t side) {
  Windows windows(merge, side);
  for (const Grid& grid : grids) {
    for (std::int64_t frame = 0; frame < grid.frames; ++frame) {
      windows.add_frame(grid.rows / merge, grid.columns / merge);
    }
  }
  std::vector<std::int64_t> places(windows.order.size());
  for (std::size_t place = 0; place < places.size(); ++place) {
    places[windows.order[place]] = static_cast<std::int64_t>(place);
  }
  return {at::tensor(windows.order), at::tensor(places), segment_ends(windows.segments),
          windows.segments};
}

}  // namespace vlscope
