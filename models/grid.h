// Grids of images and videos, and how many patches they count.
#pragma once

#include <cstdint>
#include <vector>

namespace vlscope {

/// Grid of one image or video, in patches. A video has one frame for each temporal patch.
struct Grid {
  std::int64_t frames, rows, columns;
  /// Their product, or the largest number of 64 bits where it is more than that.
  std::int64_t patches() const;
};

/// The patches of all grids together, or the largest number of 64 bits where they are more.
std::int64_t patches_of(const std::vector<Grid>& grids);

}  // namespace vlscope
