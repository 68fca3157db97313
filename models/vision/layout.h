// Where each patch lies: index lists of the vision tower, made from the grids alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/grid.h"

namespace vlscope {

/// Index lists of one row of patches, all images concatenated, on the CPU. Inside an image the
/// patches are in merge-block order: the merge x merge blocks in raster order, and the patches of a
/// block in raster order, so that each merge^2 consecutive rows become one image token.
struct VisionLayout {
  at::Tensor coordinates;  ///< `[patches, 2]` int64: row and column in the image's grid
  at::Tensor cu_seqlens;   ///< `[segments + 1]` int32: each frame of each image is a segment
  std::vector<std::int64_t> segments;  ///< Lengths of the segments.
};

/// @param merge side of a merge block
VisionLayout vision_layout(const std::vector<Grid>& grids, std::int64_t merge);

/// Lengths of segments as their ends, `[segments + 1]` int32 from 0.
at::Tensor segment_ends(const std::vector<std::int64_t>& segments);

/// How each patch blends four rows of a learned position table, in the order of VisionLayout.
struct PositionBlend {
  at::Tensor taps;     ///< `[patches, 4]` int64: rows of the table
  at::Tensor weights;  ///< `[patches, 4]` float32: bilinear, corners on corners
};

/// @param merge side of a merge block
/// @param table_side side of the square table
PositionBlend position_blend(const std::vector<Grid>& grids, std::int64_t merge,
                             std::int64_t table_side);

}  // namespace vlscope
