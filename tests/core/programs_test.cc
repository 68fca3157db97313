// The block programs of CUDA's kernels, run here block by block, against the composed operations:
// awkward shapes, all dtypes, both orders of the threads' work.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/ops/problems.h"
#include "core/ops/rotary.h"
#include "core/ops/torch_ops.h"

namespace vlscope {
namespace {

using programs::Order;
using programs::SerialBlock;
using programs::SerialTeam;
using programs::Tile;

/// Runs `run(T{})` for the type that a tensor of `dtype` holds.
template <class F>
void with_type(at::ScalarType dtype, F run) {
  switch (ops::element_of(dtype)) {
    case programs::Element::kFloat:
      return run(float{});
    case programs::Element::kBFloat16:
      return run(at::BFloat16{});
    case programs::Element::kHalf:
      return run(at::Half{});
  }
}

/// How far a result in this dtype may be from the same in float32: some roundings of a number of
/// size one.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kFloat ? 2e-5 : dtype == at::kHalf ? 4e-3 : 3e-2;
}

bool close(const at::Tensor& x, const at::Tensor& expected) {
  const double by = tolerance(x.scalar_type());
  return at::allclose(x.to(at::kFloat), expected.to(at::kFloat), by, by);
}

/// Standard normal numbers, `[batch, heads, n, d]`, cut out of a larger tensor: what lies between
/// the rows belongs to others.
at::Tensor cut_out(at::IntArrayRef shape, at::ScalarType dtype) {
  auto larger = shape.vec();
  larger.back() += 3;
  return at::randn(larger).to(dtype).narrow(-1, 2, shape.back());
}

/// NaN between the rows of the result: what is written there is seen.
at::Tensor room_for(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::full(shape, std::numeric_limits<double>::quiet_NaN(), at::dtype(dtype));
}

// --- Attention ----------------------------------------------------------------------------------

constexpr std::size_t kSharedOfA100 = 163 * 1024;

void run_blocks(const ops::AttentionOperands& operands, std::size_t shared, Order order) {
  const programs::AttentionProblem problem = ops::problem_of(operands);
  with_type(operands.q.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const Tile tile = programs::tile_within<T>(shared, problem.head_dim, problem.queries);
    ASSERT_GT(tile.queries, 0);
    for (int batch = 0; batch < problem.batch; ++batch) {
      for (int head = 0; head < problem.heads; ++head) {
        for (int first = 0; first < problem.queries; first += tile.queries) {
          SerialBlock block(programs::AttentionMemory<T>::bytes(tile), order);
          programs::attention_block<T>(block, problem, tile, {batch, head, first});
        }
      }
    }
  });
}

/// The result of the program; the same bits in both orders, or the test fails.
at::Tensor attended(ops::AttentionOperands operands, std::size_t shared = kSharedOfA100) {
  operands.out = room_for(operands.q.sizes(), operands.q.scalar_type());
  run_blocks(operands, shared, Order::kForward);
  at::Tensor forward = operands.out;
  operands.out = at::full_like(forward, 7);
  run_blocks(operands, shared, Order::kBackward);
  EXPECT_TRUE(at::equal(forward, operands.out)) << "the order of the threads' work is seen";
  return forward;
}

/// softmax(q k^T * scale + mask) v in float32, zeros where nothing may be seen.
at::Tensor expected_heads(const ops::AttentionOperands& in, const at::Tensor& allowed,
                          const at::Tensor& additive) {
  const std::int64_t heads = in.q.size(1);
  const auto whole = [&](const at::Tensor& x) {
    return ops::repeat_heads(x.to(at::kFloat), heads);
  };
  at::Tensor scores = at::matmul(whole(in.q), whole(in.k).transpose(2, 3)) * in.scale;
  if (additive.defined()) scores = scores + additive;
  if (allowed.defined()) scores = scores.masked_fill(allowed.logical_not(), -INFINITY);
  return at::matmul(at::softmax(scores, -1).nan_to_num(0), whole(in.v));
}

at::Tensor causal_rule(std::int64_t queries, std::int64_t keys, std::int64_t window) {
  const at::Tensor key = at::arange(keys), query = key.narrow(0, keys - queries, queries);
  const at::Tensor distance = query.unsqueeze(1) - key;
  const at::Tensor behind = distance >= 0;
  return window > 0 ? behind.logical_and(distance < window) : behind;
}

class OfDtype : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(0); }
};
#define OF_EACH_DTYPE(Suite)                                                                     \
  class Suite : public OfDtype {};                                                               \
  INSTANTIATE_TEST_SUITE_P(Dtypes, Suite, testing::Values(at::kFloat, at::kBFloat16, at::kHalf), \
                           [](const auto& info) { return at::toString(info.param); })

struct CausalCase {
  std::int64_t heads, kv_heads, queries, keys, head_dim, window;
};

OF_EACH_DTYPE(AttentionProgram);

TEST_P(AttentionProgram, IsCausalGroupedAttentionForEveryShape) {
  for (const auto& [heads, kv_heads, queries, keys, head_dim, window] : std::vector<CausalCase>{
           {2, 1, 70, 70, 128, 0},  // Two tiles, the second not full.
           {4, 2, 1, 131, 64, 0},   // One query over a cache.
           {3, 3, 5, 66, 72, 0},    // Some queries over a cache; a width that is no multiple of 16.
           {2, 2, 17, 17, 16, 0},
           {2, 1, 33, 33, 33, 0},  // Odd.
           {1, 1, 65, 65, 256, 0},
           {2, 1, 100, 100, 32, 7},  // A window; tiles of keys that no query of a tile sees.
           {1, 1, 1, 1, 80, 0}}) {
    ops::AttentionOperands in;
    in.q = cut_out({2, heads, queries, head_dim}, GetParam());
    in.k = cut_out({2, kv_heads, keys, head_dim}, GetParam());
    in.v = cut_out({2, kv_heads, keys, head_dim}, GetParam());
    in.scale = std::pow(static_cast<double>(head_dim), -0.5);
    in.window = window;
    EXPECT_TRUE(close(attended(in), expected_heads(in, causal_rule(queries, keys, window), {})))
        << queries << " queries, " << keys << " keys, head_dim " << head_dim;
  }
}

TEST_P(AttentionProgram, TakesAMaskInPlaceOfTheCausalRule) {
  ops::AttentionOperands in;
  in.q = cut_out({2, 4, 37, 24}, GetParam());
  in.k = cut_out({2, 2, 53, 24}, GetParam());
  in.v = cut_out({2, 2, 53, 24}, GetParam());
  in.scale = 0.3;
  at::Tensor allowed = at::rand({2, 1, 37, 53}) > 0.4;
  allowed.select(2, 5).fill_(false);  // A row that sees nothing.
  in.mask = allowed;
  EXPECT_TRUE(close(attended(in), expected_heads(in, allowed, {})));
  const at::Tensor additive =
      at::randn({1, 4, 37, 53}).masked_fill(at::rand({37, 53}) > 0.7, -INFINITY);
  in.mask = additive;
  EXPECT_TRUE(close(attended(in), expected_heads(in, {}, additive)));
  in.mask = at::full({1, 1, 37, 53}, std::numeric_limits<float>::lowest());  // Hides all alike.
  EXPECT_TRUE(close(attended(in), expected_heads(in, {}, in.mask)));
}

TEST_P(AttentionProgram, SeesNothingBeyondTheSegmentOfARow) {
  for (const std::int64_t head_dim : {16, 64, 72, 80, 128}) {
    const at::Tensor bounds =
        at::tensor(std::vector<std::int64_t>{0, 1, 65, 65, 70, 134, 141}).to(at::kInt);
    ops::AttentionOperands in;
    in.q = cut_out({1, 2, 141, head_dim}, GetParam());
    in.k = cut_out({1, 2, 141, head_dim}, GetParam());
    in.v = cut_out({1, 2, 141, head_dim}, GetParam());
    in.scale = 0.2;
    in.bounds = bounds;
    at::Tensor allowed = at::zeros({141, 141}, at::kBool);
    const auto* bound = bounds.const_data_ptr<int>();
    for (int i = 0; i + 1 < bounds.size(0); ++i) {
      const int length = bound[i + 1] - bound[i];
      allowed.narrow(0, bound[i], length).narrow(1, bound[i], length).fill_(true);
    }
    EXPECT_TRUE(close(attended(in), expected_heads(in, allowed, {}))) << head_dim;
  }
}

TEST_P(AttentionProgram, GivesTheSameInASmallerMemory) {
  ops::AttentionOperands in;
  in.q = cut_out({1, 2, 90, 64}, GetParam());
  in.k = cut_out({1, 2, 90, 64}, GetParam());
  in.v = cut_out({1, 2, 90, 64}, GetParam());
  in.scale = 0.125;
  const at::Tensor large = attended(in), small = attended(in, 40 * 1024);
  EXPECT_TRUE(close(small, large));
}

TEST_P(AttentionProgram, SurvivesScoresThatOverflowAnExponential) {
  ops::AttentionOperands in;
  in.q = cut_out({1, 1, 20, 16}, GetParam()) * 60;
  in.k = cut_out({1, 1, 20, 16}, GetParam()) * 60;
  in.v = cut_out({1, 1, 20, 16}, GetParam());
  in.scale = 1;
  EXPECT_TRUE(close(attended(in), expected_heads(in, causal_rule(20, 20, 0), {})));
}

TEST(Tile, FitsTheMemoryOfEveryDeviceForEveryHead) {
  for (const int head_dim : {16, 64, 72, 80, 128, 192, 256}) {
    for (const std::size_t limit : {99 * 1024, 163 * 1024, 227 * 1024}) {
      const Tile wide = programs::tile_within<float>(limit, head_dim, 1000);
      const Tile half = programs::tile_within<at::Half>(limit, head_dim, 1000);
      EXPECT_GE(wide.queries, Tile::kSide);
      EXPECT_GE(half.queries, wide.queries);
      EXPECT_LE(programs::AttentionMemory<float>::bytes(wide), limit);
    }
  }
  EXPECT_EQ(programs::tile_within<float>(16 * 1024, 256, 1).queries, 0);
}

// --- Rows of patterns ---------------------------------------------------------------------------

at::Tensor pattern_rows(ops::PatternOperands operands) {
  const programs::PatternProblem problem = ops::problem_of(operands);
  const int teams = problem.attention.batch * problem.head_count * problem.query_count;
  with_type(operands.out.scalar_type(), [&](auto type) {
    for (int i = 0; i < teams; ++i)
      programs::pattern_team<decltype(type)>(SerialTeam(), problem, i);
  });
  return operands.out;
}

ops::RowChoice some_rows() { return {{5, 0, 3}, {0, 6, 2, 2}}; }

OF_EACH_DTYPE(PatternProgram);

TEST_P(PatternProgram, GivesTheRowsOfTheComposedOperations) {
  const at::Tensor q = cut_out({2, 6, 7, 40}, GetParam()), k = cut_out({2, 2, 9, 40}, GetParam());
  const at::Tensor padded = at::rand({2, 1, 7, 9}) > 0.3;
  const ops::RowChoice rows = some_rows();
  for (const at::Tensor& mask :
       {at::Tensor(), padded, ops::additive_mask(padded, GetParam()), at::randn({1, 6, 7, 9})}) {
    for (const bool softmax : {false, true}) {
      ops::PatternOperands in;
      in.attention.q = q;
      in.attention.k = k;
      in.attention.scale = 0.25;
      if (mask.defined()) in.attention.mask = ops::laid_on_scores(mask);
      in.heads = at::tensor(rows.heads);
      in.queries = at::tensor(rows.queries);
      in.out = room_for({2, 3, 4, 9}, GetParam());
      in.softmax = softmax;
      const at::Tensor expected =
          ops::composed::causal_attention_rows({q, k, mask, 0.25, 0, rows, softmax});
      EXPECT_TRUE(close(pattern_rows(in), expected)) << softmax << mask;
    }
  }
}

TEST_P(PatternProgram, GivesTheRowsOfASegment) {
  const at::Tensor bounds = at::tensor(std::vector<std::int64_t>{0, 3, 4, 11}).to(at::kInt);
  const at::Tensor q = cut_out({11, 4, 24}, GetParam()), k = cut_out({11, 4, 24}, GetParam());
  const ops::RowChoice rows{{3, 1}, {10, 0, 3, 4}};
  for (const bool softmax : {false, true}) {
    ops::PatternOperands in;
    in.attention.q = q.transpose(0, 1).unsqueeze(0);
    in.attention.k = k.transpose(0, 1).unsqueeze(0);
    in.attention.scale = 0.25;
    in.attention.bounds = bounds;
    in.heads = at::tensor(rows.heads);
    in.queries = at::tensor(rows.queries);
    in.out = room_for({1, 2, 4, 8}, GetParam());
    in.softmax = softmax;
    const at::Tensor expected =
        ops::composed::segmented_attention_rows({q, k, bounds, 8, 0.25, rows, softmax});
    EXPECT_TRUE(close(pattern_rows(in).squeeze(0), expected)) << softmax;
  }
}

// --- Norm, rotary embedding, SwiGLU -------------------------------------------------------------

OF_EACH_DTYPE(RowProgram);

/// Equal but for the last bits of some numbers: in float32 a few roundings of 6e-8, and half the
/// error of a sum that is taken in another order; in half precision a neighbouring number.
void expect_last_bits(const at::Tensor& x, const at::Tensor& expected) {
  const double ulp = x.scalar_type() == at::kFloat  ? 3e-7
                     : x.scalar_type() == at::kHalf ? 1e-3
                                                    : 8e-3;
  EXPECT_TRUE(at::allclose(x.to(at::kFloat), expected.to(at::kFloat), ulp, 1e-7));
  if (x.scalar_type() == at::kFloat) return;
  EXPECT_GT((x == expected).to(at::kFloat).mean().item<float>(), 0.99);
}

TEST_P(RowProgram, NormalisesAsTheComposedOperationsDo) {
  for (const std::int64_t width : {1, 72, 128, 2049}) {
    const at::Tensor x = at::randn({5, width}).to(GetParam()) * 3;
    const at::Tensor weight = at::randn({width}).to(GetParam());
    for (const bool zero_centered : {false, true}) {
      const at::Tensor out = room_for(x.sizes(), GetParam());
      programs::NormProblem problem = ops::norm_problem(x, weight, out);
      problem.eps = 1e-6f;
      problem.zero_centered = zero_centered;
      with_type(GetParam(), [&](auto type) {
        for (int row = 0; row < 5; ++row) {
          programs::norm_team<decltype(type)>(SerialTeam(), problem, row);
        }
      });
      expect_last_bits(out, ops::composed::rms_norm(x, weight, 1e-6, zero_centered));
    }
  }
}

at::Tensor rotated(ops::RotaryOperands operands) {
  operands.out = room_for(operands.x.sizes(), operands.x.scalar_type());
  const programs::RotaryProblem problem = ops::problem_of(operands);
  const auto run = [&](auto type, auto table) {
    for (std::int64_t row = 0; row < problem.outer * problem.middle * problem.inner; ++row) {
      programs::rotary_team<decltype(type), decltype(table)>(SerialTeam(), problem, row);
    }
  };
  with_type(operands.x.scalar_type(), [&](auto type) {
    if (problem.float_tables) return run(type, float{});
    run(type, type);
  });
  return operands.out;
}

TEST_P(RowProgram, RotatesToTheBitsOfTheComposedOperations) {
  // As the text model has it: heads cut out of a projection, tables shared by the heads.
  const at::Tensor x = at::randn({2, 7, 3, 32}).to(GetParam()).transpose(1, 2);
  for (const std::int64_t turned : {32, 12}) {
    const at::Tensor cos = at::rand({2, 1, 7, turned}).to(GetParam());
    const at::Tensor sin = at::rand({2, 1, 7, turned}).to(GetParam());
    EXPECT_TRUE(at::equal(rotated({x, cos, sin, {}}), ops::composed_rotate(x, cos, sin)));
  }
}

TEST_P(RowProgram, RotatesPatchesInFloat32) {
  const at::Tensor x = at::randn({9, 3, 4, 24}).to(GetParam()).select(1, 1);
  const at::Tensor cos = at::rand({9, 1, 24}), sin = at::rand({1, 9, 24}).transpose(0, 1);
  EXPECT_TRUE(at::equal(rotated({x, cos, sin, {}}), ops::composed::rotate(x, cos, sin)));
}

TEST_P(RowProgram, GatesAsTheComposedOperationsDo) {
  const at::Tensor gate = at::randn({1000}).to(GetParam()) * 4;
  const at::Tensor up = at::randn({1000}).to(GetParam()), out = room_for({1000}, GetParam());
  with_type(GetParam(), [&](auto type) {
    using T = decltype(type);
    for (int i = 0; i < 1000; ++i) {
      out.mutable_data_ptr<T>()[i] =
          programs::swiglu_element(gate.const_data_ptr<T>()[i], up.const_data_ptr<T>()[i]);
    }
  });
  expect_last_bits(out, ops::composed::swiglu(gate, up));
}

}  // namespace
}  // namespace vlscope
