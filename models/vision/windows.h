// Windows of a tower: which image tokens lie in one, and the row of patches ordered by them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/inputs.h"

namespace vlscope {

/// The row of patches, window after window. A window is a square of image tokens (merge blocks) of
/// one frame, smaller at the right and lower edges; its tokens keep their raster order, and each
/// token its patches.
struct WindowLayout {
  at::Tensor order;                    ///< `[tokens]` int64: the token at each place
  at::Tensor places;                   ///< `[tokens]` int64: the place of each token
  at::Tensor cu_seqlens;               ///< `[windows + 1]` int32, in patches
  std::vector<std::int64_t> segments;  ///< Patches of each window.
};

/// @param merge side of a merge block in patches
/// @param side side of a window in tokens
WindowLayout window_layout(const std::vector<Grid>& grids, std::int64_t merge, std::int64_t side);

}  // namespace vlscope
