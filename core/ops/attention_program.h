// The block programs of attention: tiles, masks, the online softmax (arXiv:1805.02867) and the
// search for a row's segment. See core/ops/block.h.
#pragma once

#include "core/ops/block.h"

namespace vlscope::programs {

/// The keys that a query may see: from `begin` up to `end`.
struct KeyRange {
  int begin, end;
};

/// Which keys a query sees where rows are cut into segments, each seeing only itself.
struct Segments {
  const int* bounds;  ///< `[count + 1]` from 0 to the number of rows, ascending
  int count;

  VLSCOPE_PROGRAM KeyRange operator()(int row) const {
    int low = 0, high = count;  // The segment is in [low, high).
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (bounds[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return {bounds[low], bounds[low + 1]};
  }
};

/// Which keys a query sees where the queries are the last positions of the keys: its own, and those
/// before it, of which only the last `window` count if that is not 0.
struct Causal {
  int queries, keys, window;

  VLSCOPE_PROGRAM KeyRange operator()(int query) const {
    const int end = keys - queries + query + 1;
    return {window > 0 && window < end ? end - window : 0, end};
  }
};

/// Every key: what may be seen is left to the mask.
struct Everything {
  int keys;

  VLSCOPE_PROGRAM KeyRange operator()(int) const { return {0, keys}; }
};

/// What is laid on the scores `[queries, keys]` of a head: at most one of the two.
struct Mask {
  const float* additive;  ///< Added to them.
  const bool* allowed;    ///< Where a query may look.
  std::int64_t query_stride, key_stride;

  VLSCOPE_PROGRAM std::int64_t at(int query, int key) const {
    return query * query_stride + key * key_stride;
  }
};

/// One head: its queries, the keys and values that it reads, and where its result goes.
template <class T>
struct Head {
  Matrix<const T> q, k, v;
  Matrix<T> out;
  float scale;
  Mask mask;
};

/// The sides of what a block holds at a time: `queries` by `keys` scores, and rows of `width`
/// elements, which is the head's dimension rounded up. All are multiples of `kSide`.
struct Tile {
  int queries, keys, width;

  /// Of the matrices that tensor cores multiply.
  static constexpr int kSide = 16;
  /// Elements added to each row, so that the elements of a column lie in different banks of memory:
  /// as few as the alignment of tensor cores allows, which take no float32.
  template <class T>
  static constexpr int kPad = sizeof(T) == 4 ? 1 : 8;
  static constexpr int kSumPad = 4;

  static VLSCOPE_PROGRAM int rounded_up(int n) { return (n + kSide - 1) / kSide * kSide; }
};

/// What a block of `attend` keeps in shared memory.
template <class T>
struct AttentionMemory {
  Matrix<T> queries;      ///< `[queries, width]`
  Matrix<T> keys;         ///< `[keys, width]`; the values take their place
  Matrix<float> scores;   ///< `[queries, keys]`
  Matrix<T> weights;      ///< `[queries, keys]`, e^(score - peak)
  Matrix<float> sums;     ///< `[queries, width]`, of weights times values
  float *peaks, *totals;  ///< `[queries]`: the greatest score so far, and the sum of the weights
  KeyRange* ranges;       ///< `[queries]`

  VLSCOPE_PROGRAM AttentionMemory(std::byte* memory, const Tile& tile) {
    scores = take<float>(memory, tile.queries, tile.keys, Tile::kSumPad);
    sums = take<float>(memory, tile.queries, tile.width, Tile::kSumPad);
    queries = take<T>(memory, tile.queries, tile.width, Tile::kPad<T>);
    keys = take<T>(memory, tile.keys, tile.width, Tile::kPad<T>);
    weights = take<T>(memory, tile.queries, tile.keys, Tile::kPad<T>);
    peaks = reinterpret_cast<float*>(memory);
    totals = peaks + tile.queries;
    ranges = reinterpret_cast<KeyRange*>(totals + tile.queries);
  }

  static std::size_t bytes(const Tile& tile) {
    const auto padded = [](int rows, int columns, int pad) {
      return static_cast<std::size_t>(rows) * (columns + pad);
    };
    constexpr int kPad = Tile::kPad<T>;
    return (padded(tile.queries, tile.width, kPad) + padded(tile.keys, tile.width, kPad) +
            padded(tile.queries, tile.keys, kPad)) *
               sizeof(T) +
           (padded(tile.queries, tile.keys, Tile::kSumPad) +
            padded(tile.queries, tile.width, Tile::kSumPad)) *
               sizeof(float) +
           tile.queries * (2 * sizeof(float) + sizeof(KeyRange));
  }

 private:
  template <class U>
  static VLSCOPE_PROGRAM Matrix<U> take(std::byte*& memory, int rows, int columns, int pad) {
    const Matrix<U> matrix{reinterpret_cast<U*>(memory), rows, columns, columns + pad};
    memory += rows * matrix.stride * sizeof(U);
    return matrix;
  }
};

#ifndef __CUDACC__
/// The largest tile for heads of this dimension whose memory stays within `limit` bytes.
/// @return a tile without queries if there is none
template <class T>
Tile tile_within(std::size_t limit, int head_dim, int queries) {
  for (int side = 4 * Tile::kSide; side >= Tile::kSide; side /= 2) {
    const int rows = Tile::rounded_up(queries);
    const Tile tile{rows < side ? rows : side, side, Tile::rounded_up(head_dim)};
    if (AttentionMemory<T>::bytes(tile) <= limit) return tile;
  }
  return {0, 0, 0};
}
#endif

/// Rows of `from`, from `first` on, into shared memory, with zeros where there are none.
template <class Block, class T>
VLSCOPE_PROGRAM void load(Block& block, const Matrix<T>& to, const Matrix<const T>& from,
                          int first) {
  block.each(to.rows * to.columns, [&](int i) {
    const int row = i / to.columns, column = i % to.columns;
    const bool inside = first + row < from.rows && column < from.columns;
    to.row(row)[column] = inside ? from.row(first + row)[column] : static_cast<T>(0.0f);
  });
}

/// The score of a query and a key with the given product; -infinity where it may not look.
template <class T>
VLSCOPE_PROGRAM float masked_score(const Head<T>& head, KeyRange range, int query, int key,
                                   float product) {
  if (key < range.begin || key >= range.end) return -INFINITY;
  if (head.mask.allowed && !head.mask.allowed[head.mask.at(query, key)]) return -INFINITY;
  const float score = product * head.scale;
  return head.mask.additive ? score + head.mask.additive[head.mask.at(query, key)] : score;
}

/// out = softmax(q k^T * scale + mask) v for `tile.queries` queries from `first` on. `range` tells
/// the keys of a query, and neither end of it ever goes back from a query to the next. A query that
/// sees no key gets zeros.
///
/// Keys come by in tiles. Of all scores so far, a row keeps the greatest m and sum(e^(s - m)); when
/// m grows to m', what was summed up is multiplied by e^(m - m').
template <class Block, class T, class Range>
VLSCOPE_PROGRAM void attend(Block& block, const Tile& tile, const Head<T>& head, const Range& range,
                            int first) {
  const AttentionMemory<T> memory(block.shared(), tile);
  const int last = (first + tile.queries < head.q.rows ? first + tile.queries : head.q.rows) - 1;
  load(block, memory.queries, head.q, first);
  block.each(tile.queries, [&](int row) {
    memory.peaks[row] = -INFINITY;
    memory.totals[row] = 0;
    memory.ranges[row] = first + row <= last ? range(first + row) : KeyRange{0, 0};
  });
  block.each(tile.queries * tile.width,
             [&](int i) { memory.sums.row(i / tile.width)[i % tile.width] = 0; });

  const int end = range(last).end;
  for (int key = range(first).begin; key < end; key += tile.keys) {
    load(block, memory.keys, head.k, key);
    block.multiply_transposed(memory.scores, memory.queries, memory.keys);
    block.teams(tile.queries, [&](int row, const auto& team) {
      float* scores = memory.scores.row(row);
      const float before = memory.peaks[row];
      const float here = team.max(tile.keys, [&](int j) {
        return scores[j] = masked_score(head, memory.ranges[row], first + row, key + j, scores[j]);
      });
      const float peak = fmaxf(before, here);
      const bool sees_nothing = peak == -INFINITY;
      const float total = team.sum(tile.keys, [&](int j) {
        const float weight = sees_nothing ? 0.0f : expf(scores[j] - peak);
        memory.weights.row(row)[j] = static_cast<T>(weight);
        return rounded<T>(weight);
      });
      const float shrink = sees_nothing ? 1.0f : expf(before - peak);
      team.each(tile.width, [&](int i) { memory.sums.row(row)[i] *= shrink; });
      team.once([&] {
        memory.totals[row] = memory.totals[row] * shrink + total;
        memory.peaks[row] = peak;
      });
    });
    load(block, memory.keys, head.v, key);
    block.multiply_add(memory.sums, memory.weights, memory.keys);
  }
  block.each(tile.queries * tile.width, [&](int i) {
    const int row = i / tile.width, column = i % tile.width;
    if (first + row > last || column >= head.out.columns) return;
    const float total = memory.totals[row], sum = memory.sums.row(row)[column];
    head.out.row(first + row)[column] = static_cast<T>(total > 0 ? sum / total : 0.0f);
  });
}

/// One row of a pattern.
template <class T>
struct PatternRow {
  T* out;     ///< `[width]`
  int width;  ///< From key `origin` on.
  int origin;
  bool softmax;  ///< Probabilities; else scores.
  /// Added to the score of a key that the query may not see: the least number of T, or -infinity,
  /// and then there may be no such key.
  float hidden;
};

/// The scores of one query of `head`, rounded where the composed operations round: the product,
/// its scaling, and the sum with the mask; and their softmax, taken in float32.
template <class Team, class T>
VLSCOPE_PROGRAM void pattern_row(const Team& team, const Head<T>& head, KeyRange range, int query,
                                 const PatternRow<T>& row) {
  const auto score = [&](int key) {
    const bool inside = key >= range.begin && key < range.end;
    if (!inside && row.hidden == -INFINITY) return -INFINITY;
    float product = 0;
    for (int i = 0; i < head.q.columns; ++i) {
      product += static_cast<float>(head.q.row(query)[i]) * static_cast<float>(head.k.row(key)[i]);
    }
    const float scaled = rounded<T>(rounded<T>(product) * head.scale);
    const bool allowed = !head.mask.allowed || head.mask.allowed[head.mask.at(query, key)];
    if (!inside || !allowed) return rounded<T>(scaled + row.hidden);
    if (!head.mask.additive) return scaled;
    return rounded<T>(scaled + head.mask.additive[head.mask.at(query, key)]);
  };
  team.each(row.width, [&](int i) { row.out[i] = static_cast<T>(score(row.origin + i)); });
  if (!row.softmax) return;
  // Each thread reads what it has written itself.
  const float peak = team.max(row.width, [&](int i) { return static_cast<float>(row.out[i]); });
  const float total =
      team.sum(row.width, [&](int i) { return expf(static_cast<float>(row.out[i]) - peak); });
  team.each(row.width, [&](int i) {
    row.out[i] = static_cast<T>(expf(static_cast<float>(row.out[i]) - peak) / total);
  });
}

/// Where the rows of a tensor `[batch, heads, rows, head_dim]` lie; strides count elements, and
/// those of a row are adjacent.
struct Strided {
  void* data;
  std::int64_t batch, head, row;

  template <class T>
  VLSCOPE_PROGRAM Matrix<T> matrix(int of_batch, int of_head, int rows, int columns) const {
    return {static_cast<T*>(data) + of_batch * batch + of_head * head, rows, columns, row};
  }
};

/// Attention of either kind, as a launch sees it. Query head j reads the keys and values of head
/// j / (heads / kv_heads).
struct AttentionProblem {
  Strided q, k, v, out;
  int batch, heads, kv_heads, queries, keys, head_dim;
  float scale;
  Mask mask;                           ///< Of the first head of the first prompt; takes the place
  std::int64_t mask_batch, mask_head;  ///< of the causal rule.
  int window;                          ///< See Causal; 0 for none.
  const int* bounds;                   ///< See Segments; nullptr under the causal rule.
  int segments;

  template <class T>
  VLSCOPE_PROGRAM Head<T> head(int of_batch, int of_head) const {
    const int kv_head = of_head / (heads / kv_heads);
    Mask laid = mask;
    if (laid.additive != nullptr) laid.additive += of_batch * mask_batch + of_head * mask_head;
    if (laid.allowed != nullptr) laid.allowed += of_batch * mask_batch + of_head * mask_head;
    return {q.matrix<const T>(of_batch, of_head, queries, head_dim),
            k.matrix<const T>(of_batch, kv_head, keys, head_dim),
            v.matrix<const T>(of_batch, kv_head, keys, head_dim),
            out.matrix<T>(of_batch, of_head, queries, head_dim),
            scale,
            laid};
  }

  /// Calls `run` with what tells the keys of a query.
  template <class F>
  VLSCOPE_PROGRAM void with_range(F run) const {
    if (bounds != nullptr) {
      run(Segments{bounds, segments});
    } else if (mask.additive != nullptr || mask.allowed != nullptr) {
      run(Everything{keys});
    } else {
      run(Causal{queries, keys, window});
    }
  }
};

/// What one block computes: queries of one head, from `first` on.
struct TilePlace {
  int batch, head, first;
};

template <class T, class Block>
VLSCOPE_PROGRAM void attention_block(Block& block, const AttentionProblem& problem,
                                     const Tile& tile, const TilePlace& place) {
  problem.with_range([&](const auto& range) {
    attend(block, tile, problem.head<T>(place.batch, place.head), range, place.first);
  });
}

/// Chosen rows of the patterns of a problem, which has no values.
struct PatternProblem {
  AttentionProblem attention;
  const std::int64_t *heads, *queries;  ///< `[head_count]` and `[query_count]`
  int head_count, query_count;
  void* out;  ///< `[batch, head_count, query_count, width]`, contiguous
  int width;  ///< Keys of a row: all, or those of the longest segment.
  bool softmax;
  float hidden;  ///< See PatternRow.
};

/// The team that computes one row: `index` counts them over batch, heads and queries.
template <class T, class Team>
VLSCOPE_PROGRAM void pattern_team(const Team& team, const PatternProblem& problem, int index) {
  const int query = static_cast<int>(problem.queries[index % problem.query_count]);
  const int head_index = index / problem.query_count;
  const int head = static_cast<int>(problem.heads[head_index % problem.head_count]);
  const int batch = head_index / problem.head_count;
  T* out = static_cast<T*>(problem.out) + static_cast<std::int64_t>(index) * problem.width;
  problem.attention.with_range([&](const auto& range) {
    const KeyRange keys = range(query);
    const int origin = problem.attention.bounds ? keys.begin : 0;
    pattern_row(team, problem.attention.head<T>(batch, head), keys, query,
                PatternRow<T>{out, problem.width, origin, problem.softmax, problem.hidden});
  });
}

}  // namespace vlscope::programs
