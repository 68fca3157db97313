// What a block of threads can do, for programs that are written once: CUDA runs them on the device
// (core/ops/cuda/block.cuh), and the tests run them here, block by block, on the CPU.
//
// A program never asks which thread it is. It hands out work by `each` and `teams`, and when such a
// call returns, all threads are done with it and see what the others have written. Pieces of one
// call must not depend on each other: on the CPU they run in either order, so that a test can tell.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

// The compiler of CUDA's device code runs no program on the host.
#ifdef __CUDACC__
#define VLSCOPE_PROGRAM __device__
#else
#define VLSCOPE_PROGRAM
#include <array>
#include <vector>
#endif

namespace vlscope::programs {

/// Rows of `columns` elements, `stride` apart.
template <class T>
struct Matrix {
  T* data;
  int rows, columns;
  std::int64_t stride;

  VLSCOPE_PROGRAM T* row(int i) const { return data + i * stride; }
};

/// `x` as it comes out of an operation that returns `T`.
template <class T>
VLSCOPE_PROGRAM inline float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

#ifndef __CUDACC__

/// In which order the pieces of one call run.
enum class Order { kForward, kBackward };

/// Threads that work on one row together, each taking some of its elements: here, one after the
/// other.
class SerialTeam {
 public:
  explicit SerialTeam(Order order = Order::kForward) : order_(order) {}

  /// Calls `f(i)` for each i below `count`.
  template <class F>
  void each(int count, F f) const {
    for (int i = 0; i < count; ++i) f(order_ == Order::kForward ? i : count - 1 - i);
  }
  /// The sum of `f(i)` over each i below `count`, known to every thread. As in a warp, each of 32
  /// lanes sums up its own first: a sum rounds as it would on the device.
  template <class F>
  float sum(int count, F f) const {
    std::array<float, 32> lanes{};
    for (int i = 0; i < count; ++i) lanes[i % lanes.size()] += f(i);
    for (std::size_t half = lanes.size() / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
  /// The greatest `f(i)`; -infinity for none.
  template <class F>
  float max(int count, F f) const {
    float result = -INFINITY;
    each(count, [&](int i) { result = std::fmax(result, f(i)); });
    return result;
  }
  /// Calls `f()` in one thread, when all threads are done with what came before.
  template <class F>
  void once(F f) const {
    f();
  }

 private:
  Order order_;
};

/// A block of threads with memory that they share. Its bytes begin as NaN, whatever they are read
/// as: a program must write before it reads.
class SerialBlock {
 public:
  explicit SerialBlock(std::size_t shared_bytes, Order order = Order::kForward)
      : shared_(shared_bytes, std::byte{0xff}), order_(order) {}

  std::byte* shared() { return shared_.data(); }
  /// Calls `f(i)` for each i below `count`, in any thread.
  template <class F>
  void each(int count, F f) const {
    SerialTeam(order_).each(count, f);
  }
  /// Calls `f(i, team)` for each i below `count`, in the threads of one team.
  template <class F>
  void teams(int count, F f) const {
    each(count, [&](int i) { f(i, SerialTeam(order_)); });
  }
  /// c = a b^T; c is `[a.rows, b.rows]`. Sums are taken in float32.
  template <class T>
  void multiply_transposed(Matrix<float> c, Matrix<T> a, Matrix<T> b) const {
    each(a.rows * b.rows, [&](int i) {
      const T *x = a.row(i / b.rows), *y = b.row(i % b.rows);
      float sum = 0;
      for (int k = 0; k < a.columns; ++k)
        sum += static_cast<float>(x[k]) * static_cast<float>(y[k]);
      c.row(i / b.rows)[i % b.rows] = sum;
    });
  }
  /// c += a b; c is `[a.rows, b.columns]`.
  template <class T>
  void multiply_add(Matrix<float> c, Matrix<T> a, Matrix<T> b) const {
    each(a.rows * b.columns, [&](int i) {
      const int row = i / b.columns, column = i % b.columns;
      float sum = c.row(row)[column];
      for (int k = 0; k < a.columns; ++k) {
        sum += static_cast<float>(a.row(row)[k]) * static_cast<float>(b.row(k)[column]);
      }
      c.row(row)[column] = sum;
    });
  }

 private:
  std::vector<std::byte> shared_;
  Order order_;
};

#endif

}  // namespace vlscope::programs
