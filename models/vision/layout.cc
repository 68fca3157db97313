#include "models/vision/layout.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

namespace vlscope {
namespace {

/// Two neighbouring rows (or columns) of the position table and their weights, in the float32
/// arithmetic of transformers 5.17.0 (`_interpolation_axis_taps_weights`, align_corners).
struct Blend {
  std::int64_t tap[2];
  float weight[2];
};

Blend blend(std::int64_t index, std::int64_t size, std::int64_t side) {
  const float source = static_cast<float>(index) * static_cast<float>(side - 1) /
                       static_cast<float>(std::max<std::int64_t>(size - 1, 1));
  const float floor = std::floor(source);
  Blend result{};
  for (int i = 0; i < 2; ++i) {
    const float distance = std::fabs(source - floor - static_cast<float>(i));
    result.tap[i] = std::clamp<std::int64_t>(static_cast<std::int64_t>(floor) + i, 0, side - 1);
    result.weight[i] = std::max(1.0f - distance, 0.0f);
  }
  return result;
}

/// Calls `visit(row, column)` for each patch of a frame, in merge-block order.
template <class Visit>
void for_each_patch_of_frame(const Grid& grid, std::int64_t merge, Visit visit) {
  for (std::int64_t block_row = 0; block_row < grid.rows; block_row += merge) {
    for (std::int64_t block_column = 0; block_column < grid.columns; block_column += merge) {
      for (std::int64_t row = block_row; row < block_row + merge; ++row) {
        for (std::int64_t column = block_column; column < block_column + merge; ++column) {
          visit(row, column);
        }
      }
    }
  }
}

/// Calls `visit(grid, row, column)` for each patch of the row of patches.
template <class Visit>
void for_each_patch(const std::vector<Grid>& grids, std::int64_t merge, Visit visit) {
  for (const Grid& grid : grids) {
    for (std::int64_t frame = 0; frame < grid.frames; ++frame) {
      for_each_patch_of_frame(
          grid, merge, [&](std::int64_t row, std::int64_t column) { visit(grid, row, column); });
    }
  }
}

}  // namespace

at::Tensor segment_ends(const std::vector<std::int64_t>& segments) {
  const at::Tensor ends = at::empty({static_cast<std::int64_t>(segments.size()) + 1}, at::kInt);
  auto* end = ends.mutable_data_ptr<std::int32_t>();
  end[0] = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    end[i + 1] = end[i] + static_cast<std::int32_t>(segments[i]);
  }
  return ends;
}

VisionLayout vision_layout(const std::vector<Grid>& grids, std::int64_t merge) {
  VisionLayout layout;
  for (const Grid& grid : grids) {
    layout.segments.insert(layout.segments.end(), grid.frames, grid.rows * grid.columns);
  }
  layout.cu_seqlens = segment_ends(layout.segments);
  layout.coordinates = at::empty({patches_of(grids), 2}, at::kLong);
  auto* coordinate = layout.coordinates.mutable_data_ptr<std::int64_t>();
  for_each_patch(grids, merge, [&](const Grid&, std::int64_t row, std::int64_t column) {
    *coordinate++ = row;
    *coordinate++ = column;
  });
  return layout;
}

PositionBlend position_blend(const std::vector<Grid>& grids, std::int64_t merge,
                             std::int64_t table_side) {
  const std::int64_t patches = patches_of(grids);
  PositionBlend result{at::empty({patches, 4}, at::kLong), at::empty({patches, 4}, at::kFloat)};
  auto* tap = result.taps.mutable_data_ptr<std::int64_t>();
  auto* weight = result.weights.mutable_data_ptr<float>();
  for_each_patch(grids, merge, [&](const Grid& grid, std::int64_t row, std::int64_t column) {
    const Blend down = blend(row, grid.rows, table_side);
    const Blend across = blend(column, grid.columns, table_side);
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        *tap++ = down.tap[i] * table_side + across.tap[j];
        *weight++ = down.weight[i] * across.weight[j];
      }
    }
  });
  return result;
}

}  // namespace vlscope
