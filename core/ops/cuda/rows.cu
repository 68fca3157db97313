// RMSNorm, rotary embedding and SwiGLU: the programs of core/ops/row_programs.h, mapped to blocks.
// Compiled without contraction of products and sums (-fmad=false): they round where the composed
// operations do.
#include "core/ops/cuda/block.cuh"
#include "core/ops/cuda/dispatch.cuh"
#include "core/ops/cuda/launch.h"

namespace vlscope::programs {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = kThreads / kWarpSize;

unsigned blocks_for(std::int64_t count, int of_block) {
  return static_cast<unsigned>((count + of_block - 1) / of_block);
}

template <class T>
__global__ void norm(NormProblem problem) {
  norm_team<T>(WholeBlock(), problem, blockIdx.x);
}

/// One warp a row.
template <class T, class Table>
__global__ void rotary(RotaryProblem problem) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / kWarpSize;
  if (row >= problem.outer * problem.middle * problem.inner) return;
  rotary_team<T, Table>(Warp(), problem, row);
}

template <class T>
__global__ void swiglu(SwigluProblem problem) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= problem.elements) return;
  static_cast<T*>(problem.out)[i] =
      swiglu_element(static_cast<const T*>(problem.gate)[i], static_cast<const T*>(problem.up)[i]);
}

}  // namespace

void launch(Element element, const NormProblem& problem, cudaStream_t stream) {
  with_type(element, [&](auto type) {
    norm<decltype(type)><<<blocks_for(problem.rows, 1), kThreads, 0, stream>>>(problem);
  });
}

void launch(Element element, const RotaryProblem& problem, cudaStream_t stream) {
  const unsigned blocks = blocks_for(problem.outer * problem.middle * problem.inner, kRowsOfBlock);
  with_type(element, [&](auto type) {
    using T = decltype(type);
    if (problem.float_tables) {
      rotary<T, float><<<blocks, kThreads, 0, stream>>>(problem);
    } else {
      rotary<T, T><<<blocks, kThreads, 0, stream>>>(problem);
    }
  });
}

void launch(Element element, const SwigluProblem& problem, cudaStream_t stream) {
  with_type(element, [&](auto type) {
    swiglu<decltype(type)>
        <<<blocks_for(problem.elements, kThreads), kThreads, 0, stream>>>(problem);
  });
}

}  // namespace vlscope::programs
