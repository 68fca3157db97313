// The block of core/ops/block.h as CUDA has it: threads, warps, shared memory, and tensor cores for
// products in half precision.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <type_traits>

#include "core/ops/block.h"

namespace vlscope::programs {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  static __device__ float identity() { return 0; }
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  static __device__ float identity() { return -INFINITY; }
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// The same result in all lanes of a warp.
template <class Combine>
__device__ float combined_in_warp(float mine, Combine combine) {
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    mine = combine(mine, __shfl_xor_sync(kAllLanes, mine, step));
  }
  return mine;
}

/// A warp as a team.
class Warp {
 public:
  template <class F>
  __device__ void each(int count, F f) const {
    for (int i = lane(); i < count; i += kWarpSize) f(i);
    __syncwarp();
  }
  template <class F>
  __device__ float sum(int count, F f) const {
    return combined(count, f, Sum());
  }
  template <class F>
  __device__ float max(int count, F f) const {
    return combined(count, f, Max());
  }
  template <class F>
  __device__ void once(F f) const {
    __syncwarp();
    if (lane() == 0) f();
    __syncwarp();
  }

 private:
  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  template <class F, class Combine>
  __device__ float combined(int count, F f, Combine combine) const {
    float mine = Combine::identity();
    for (int i = lane(); i < count; i += kWarpSize) mine = combine(mine, f(i));
    return combined_in_warp(mine, combine);
  }
};

/// All threads of a block as one team.
class WholeBlock {
 public:
  template <class F>
  __device__ void each(int count, F f) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ float sum(int count, F f) const {
    return combined(count, f, Sum());
  }
  template <class F>
  __device__ float max(int count, F f) const {
    return combined(count, f, Max());
  }

 private:
  template <class F, class Combine>
  __device__ float combined(int count, F f, Combine combine) const {
    __shared__ float of_warps[kWarpSize];
    float mine = Combine::identity();
    for (int i = threadIdx.x; i < count; i += blockDim.x) mine = combine(mine, f(i));
    mine = combined_in_warp(mine, combine);
    if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = mine;
    __syncthreads();
    float result = Combine::identity();
    for (int warp = 0; warp < blockDim.x / kWarpSize; ++warp) {
      result = combine(result, of_warps[warp]);
    }
    __syncthreads();  // The next call writes there again.
    return result;
  }
};

/// See SerialBlock.
class Block {
 public:
  explicit __device__ Block(std::byte* shared) : shared_(shared) {}

  __device__ std::byte* shared() const { return shared_; }
  template <class F>
  __device__ void each(int count, F f) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ void teams(int count, F f) const {
    for (int i = threadIdx.x / kWarpSize; i < count; i += blockDim.x / kWarpSize) f(i, Warp());
    __syncthreads();
  }

  template <class T>
  __device__ void multiply_transposed(Matrix<float> c, Matrix<T> a, Matrix<T> b) const {
    if constexpr (std::is_same_v<T, float>) {
      const auto transposed = [&](int k, int column) { return b.row(column)[k]; };
      multiply<false>(c, a, transposed);
    } else {
      using Layout = nvcuda::wmma::col_major;
      const auto at = [&](int k, int column) { return b.row(column) + k; };
      multiply_on_tensor_cores<T, Layout, false>(c, a, at, b.stride);
    }
    __syncthreads();
  }
  template <class T>
  __device__ void multiply_add(Matrix<float> c, Matrix<T> a, Matrix<T> b) const {
    if constexpr (std::is_same_v<T, float>) {
      const auto element = [&](int k, int column) { return b.row(k)[column]; };
      multiply<true>(c, a, element);
    } else {
      using Layout = nvcuda::wmma::row_major;
      const auto at = [&](int k, int column) { return b.row(k) + column; };
      multiply_on_tensor_cores<T, Layout, true>(c, a, at, b.stride);
    }
    __syncthreads();
  }

 private:
  /// Each thread takes `kOwn` by `kOwn` elements of c, as far from each other as they can be, so
  /// that neighbouring threads read neighbouring elements of b.
  template <bool kAdd, class B>
  static __device__ void multiply(Matrix<float> c, Matrix<float> a, B b) {
    constexpr int kOwn = 4;
    const int rows = c.rows / kOwn, columns = c.columns / kOwn;
    for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
      const int row = i / columns, column = i % columns;
      float sums[kOwn][kOwn] = {};
      for (int k = 0; k < a.columns; ++k) {
        float x[kOwn], y[kOwn];
        for (int j = 0; j < kOwn; ++j) {
          x[j] = a.row(row + j * rows)[k];
          y[j] = b(k, column + j * columns);
        }
        for (int r = 0; r < kOwn; ++r) {
          for (int s = 0; s < kOwn; ++s) sums[r][s] += x[r] * y[s];
        }
      }
      for (int r = 0; r < kOwn; ++r) {
        for (int s = 0; s < kOwn; ++s) {
          float& place = c.row(row + r * rows)[column + s * columns];
          place = kAdd ? place + sums[r][s] : sums[r][s];
        }
      }
    }
  }

  /// Each warp takes squares of c. `b_at(k, column)` is where the square of b begins.
  template <class T, class Layout, bool kAdd, class B>
  static __device__ void multiply_on_tensor_cores(Matrix<float> c, Matrix<T> a, B b_at,
                                                  std::int64_t b_stride) {
    namespace wmma = nvcuda::wmma;
    constexpr int kSide = 16;
    const auto stride = [](std::int64_t n) { return static_cast<unsigned>(n); };
    const int columns = c.columns / kSide, squares = c.rows / kSide * columns;
    for (int i = threadIdx.x / kWarpSize; i < squares; i += blockDim.x / kWarpSize) {
      const int row = i / columns * kSide, column = i % columns * kSide;
      float* place = c.row(row) + column;
      wmma::fragment<wmma::accumulator, kSide, kSide, kSide, float> sums;
      if constexpr (kAdd) {
        wmma::load_matrix_sync(sums, place, stride(c.stride), wmma::mem_row_major);
      } else {
        wmma::fill_fragment(sums, 0.0f);
      }
      for (int k = 0; k < a.columns; k += kSide) {
        wmma::fragment<wmma::matrix_a, kSide, kSide, kSide, T, wmma::row_major> x;
        wmma::fragment<wmma::matrix_b, kSide, kSide, kSide, T, Layout> y;
        wmma::load_matrix_sync(x, a.row(row) + k, stride(a.stride));
        wmma::load_matrix_sync(y, b_at(k, column), stride(b_stride));
        wmma::mma_sync(sums, x, y, sums);
      }
      wmma::store_matrix_sync(place, sums, stride(c.stride), wmma::mem_row_major);
    }
  }

  std::byte* shared_;
};

}  // namespace vlscope::programs
