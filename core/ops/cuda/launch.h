// Launches of the kernels. All return at once; errors of a launch are left for cudaGetLastError.
#pragma once

#include <cuda_runtime_api.h>

#include "core/ops/launch.h"

namespace vlscope::programs {

/// @param tile,bytes what a block holds, and the shared memory that takes
struct AttentionLaunch {
  AttentionProblem problem;
  Tile tile;
  std::size_t bytes;
};

void launch(Element element, const AttentionLaunch& attention, cudaStream_t stream);
void launch(Element element, const PatternProblem& problem, cudaStream_t stream);
void launch(Element element, const NormProblem& problem, cudaStream_t stream);
void launch(Element element, const RotaryProblem& problem, cudaStream_t stream);
void launch(Element element, const SwigluProblem& problem, cudaStream_t stream);

}  // namespace vlscope::programs
