// Attention and rows of its patterns: the programs of core/ops/attention_program.h, mapped to
// blocks.
#include "core/ops/cuda/block.cuh"
#include "core/ops/cuda/dispatch.cuh"
#include "core/ops/cuda/launch.h"

namespace vlscope::programs {
namespace {

constexpr int kAttentionThreads = 128;
constexpr int kPatternThreads = 256;

template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention(AttentionProblem problem, Tile tile) {
  extern __shared__ __align__(128) std::byte memory[];
  Block block(memory);
  const int first = blockIdx.x * tile.queries;
  attention_block<T>(block, problem, tile,
                     {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), first});
}

template <class T>
__global__ void __launch_bounds__(kPatternThreads) pattern(PatternProblem problem) {
  pattern_team<T>(WholeBlock(), problem, blockIdx.x);
}

}  // namespace

void launch(Element element, const AttentionLaunch& in, cudaStream_t stream) {
  const AttentionProblem& problem = in.problem;
  const dim3 blocks((problem.queries + in.tile.queries - 1) / in.tile.queries, problem.heads,
                    problem.batch);
  with_type(element, [&](auto type) {
    const auto kernel = attention<decltype(type)>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(in.bytes));
    kernel<<<blocks, kAttentionThreads, in.bytes, stream>>>(problem, in.tile);
  });
}

void launch(Element element, const PatternProblem& problem, cudaStream_t stream) {
  const int rows = problem.attention.batch * problem.head_count * problem.query_count;
  with_type(element, [&](auto type) {
    pattern<decltype(type)><<<rows, kPatternThreads, 0, stream>>>(problem);
  });
}

}  // namespace vlscope::programs
