// The row programs of RMSNorm, the rotary embedding and SwiGLU: one launch each where the composed
// operations take several. Each rounds where those round. See core/ops/block.h.
#pragma once

#include "core/ops/block.h"

namespace vlscope::programs {

/// out = weight * (x / sqrt(mean(x^2) + eps)) of one row (arXiv:1910.07467): statistics in float32,
/// cast to T before the weight; or, zero-centred, (1 + weight) times it, all in float32.
template <class T>
struct NormRow {
  const T *x, *weight;
  T* out;
  int width;
  float eps;
  bool zero_centered;
};

template <class Team, class T>
VLSCOPE_PROGRAM void rms_norm_row(const Team& team, const NormRow<T>& row) {
  const float squares = team.sum(row.width, [&](int i) {
    const float x = static_cast<float>(row.x[i]);
    return x * x;
  });
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(row.width) + row.eps);
  team.each(row.width, [&](int i) {
    const float normalised = static_cast<float>(row.x[i]) * scale;
    const float weight = static_cast<float>(row.weight[i]);
    row.out[i] = static_cast<T>(row.zero_centered ? normalised * (1.0f + weight)
                                                  : rounded<T>(normalised) * weight);
  });
}

/// out = x cos + (-x2, x1) sin of one row x = (x1, x2) (arXiv:2104.09864), in the arithmetic of
/// `Table`; elements from `turned` on stay as they are.
template <class T, class Table>
struct RotaryRow {
  const T* x;
  const Table *cos, *sin;
  T* out;
  int width, turned;
};

template <class Team, class T, class Table>
VLSCOPE_PROGRAM void rotate_row(const Team& team, const RotaryRow<T, Table>& row) {
  const int half = row.turned / 2;
  team.each(row.width, [&](int i) {
    const float x = static_cast<float>(row.x[i]);
    if (i >= row.turned) {
      row.out[i] = row.x[i];
      return;
    }
    const float other =
        i < half ? -static_cast<float>(row.x[i + half]) : static_cast<float>(row.x[i - half]);
    const float along = rounded<Table>(x * static_cast<float>(row.cos[i]));
    const float across = rounded<Table>(other * static_cast<float>(row.sin[i]));
    row.out[i] = static_cast<T>(rounded<Table>(along + across));
  });
}

/// silu(gate) * up, with silu(x) = x / (1 + e^-x) (arXiv:2002.05202).
template <class T>
VLSCOPE_PROGRAM inline T swiglu_element(T gate, T up) {
  const float x = static_cast<float>(gate);
  const float activated = rounded<T>(x / (1.0f + expf(-x)));
  return static_cast<T>(activated * static_cast<float>(up));
}

}  // namespace vlscope::programs
