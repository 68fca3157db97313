// What the tensors of an operation look like to a launch, and who launches it. No header of torch
// is needed here: the device's compiler would take half a minute over one.
#pragma once

#include "core/ops/attention_program.h"
#include "core/ops/row_programs.h"

namespace vlscope::programs {

/// What tensors hold.
enum class Element { kFloat, kBFloat16, kHalf };

/// See NormRow; `rows` contiguous rows of x and out.
struct NormProblem {
  const void *x, *weight;
  void* out;
  std::int64_t rows;
  int width;
  float eps;
  bool zero_centered;
};

/// Rows of up to four axes, of which the last is that of a row's elements; strides count elements.
struct RowStrides {
  std::int64_t outer, middle, inner;
};

/// See RotaryRow. Rows are `[outer, middle, inner]`; cos and sin have strides of 0 where they are
/// shared.
struct RotaryProblem {
  const void *x, *cos, *sin;
  void* out;
  RowStrides x_strides, table_strides, out_strides;
  std::int64_t outer, middle, inner;
  int width, turned;
  bool float_tables;  ///< cos and sin are float32 whatever x is; else they are like x.
};

/// See swiglu_element; contiguous.
struct SwigluProblem {
  const void *gate, *up;
  void* out;
  std::int64_t elements;
};

template <class T, class Team>
VLSCOPE_PROGRAM void norm_team(const Team& team, const NormProblem& problem, std::int64_t row) {
  const std::int64_t first = row * problem.width;
  NormRow<T> norm{static_cast<const T*>(problem.x) + first,
                  static_cast<const T*>(problem.weight),
                  static_cast<T*>(problem.out) + first,
                  problem.width,
                  problem.eps,
                  problem.zero_centered};
  rms_norm_row(team, norm);
}

/// The row of that number.
template <class T, class Table>
VLSCOPE_PROGRAM RotaryRow<T, Table> rotary_row(const RotaryProblem& problem, std::int64_t row) {
  const std::int64_t inner = row % problem.inner, middle = row / problem.inner % problem.middle;
  const std::int64_t outer = row / problem.inner / problem.middle;
  const auto at = [&](const RowStrides& strides) {
    return outer * strides.outer + middle * strides.middle + inner * strides.inner;
  };
  return {static_cast<const T*>(problem.x) + at(problem.x_strides),
          static_cast<const Table*>(problem.cos) + at(problem.table_strides),
          static_cast<const Table*>(problem.sin) + at(problem.table_strides),
          static_cast<T*>(problem.out) + at(problem.out_strides),
          problem.width,
          problem.turned};
}

template <class T, class Table, class Team>
VLSCOPE_PROGRAM void rotary_team(const Team& team, const RotaryProblem& problem, std::int64_t row) {
  rotate_row(team, rotary_row<T, Table>(problem, row));
}

}  // namespace vlscope::programs
