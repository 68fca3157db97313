#include "models/grid.h"

#include <limits>

namespace vlscope {
namespace {

// No tensor has so many rows: a count that wrapped around could agree with one that has few.
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? kMost : result;
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? kMost : result;
}

}  // namespace

std::int64_t Grid::patches() const { return product(product(frames, rows), columns); }

std::int64_t patches_of(const std::vector<Grid>& grids) {
  std::int64_t patches = 0;
  for (const Grid& grid : grids) patches = sum(patches, grid.patches());
  return patches;
}

}  // namespace vlscope
