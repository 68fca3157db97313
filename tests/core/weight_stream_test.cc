#include "core/weight_stream.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/large_weight.h"
#include "core/mapped_file.h"
#include "tests/core/checkpoint_files.h"

namespace vlscope {
namespace {

at::Tensor half(at::IntArrayRef shape) { return at::randn(shape).to(at::kBFloat16); }

std::uintptr_t address(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
}

TEST(WeightStream, WidensPiecesBelowEachOtherWhereTheyAreAskedFor) {
  const WeightStream stream(at::kFloat, {});
  const at::Tensor x = at::ones({1});
  const at::Tensor exchanged = half({5, 3}).t();
  for (const std::size_t offset : {0, 4, 60, 64, 100}) {
    const std::vector<at::Tensor> pieces{half({3, 5}), exchanged};
    const at::Tensor whole = stream.widened(pieces, x, offset);
    EXPECT_TRUE(whole.equal(at::cat(pieces).to(at::kFloat)));
    EXPECT_TRUE(whole.is_contiguous());
    EXPECT_EQ(address(whole) % 64, offset % 64);
  }
}

TEST(WeightStream, UsesABufferAgainOnceNobodyHoldsItAndExchangesOneThatIsTooSmall) {
  const WeightStream stream(at::kFloat, {});
  const at::Tensor x = at::ones({1}), small = half({2, 8}), large = half({32, 8});
  EXPECT_EQ(stream.held().buffers, 0);
  stream.widened(small, x);
  EXPECT_EQ(stream.held().bytes, 64);
  stream.widened(large, x);
  stream.widened(small, x);
  EXPECT_EQ(stream.held().buffers, 1);
  EXPECT_EQ(stream.held().bytes, 1024);

  const at::Tensor held = stream.widened(large, x), second = stream.widened(small, x);
  EXPECT_EQ(stream.held().buffers, 2);
  EXPECT_EQ(stream.held().bytes, 1024 + 64);
  EXPECT_TRUE(held.equal(large.to(at::kFloat)));
  EXPECT_NE(address(held), address(second));
}

TEST(WeightStream, LeavesToAGraphWhatTheGraphKeeps) {
  at::Tensor expected, found;
  {
    const WeightStream stream(at::kFloat, {});
    const at::Tensor weight = half({4, 8}), other = half({4, 8});
    const at::Tensor x = at::randn({3, 8}).requires_grad_();
    const at::Tensor y = at::linear(x, stream.widened(weight, x));
    EXPECT_EQ(stream.held().buffers, 0);
    stream.widened(other, at::ones({1}));
    found = y, expected = at::ones({3, 4}).matmul(weight.to(at::kFloat));
    found.sum().backward();  // after the buffer has been used, and the weights dropped
    found = x.grad();
  }
  EXPECT_TRUE(found.allclose(expected));
  const at::NoGradGuard no_grad;
  const WeightStream stream(at::kFloat, {});
  stream.widened(half({4, 8}), at::ones({1}).requires_grad_());
  EXPECT_EQ(stream.held().buffers, 1);
}

TEST(WeightStream, KeepsItsMemoryForTensorsThatOutliveIt) {
  at::Tensor weight = half({4, 8}), widened;
  {
    const WeightStream stream(at::kFloat, {});
    widened = stream.widened(weight, at::ones({1}));
  }
  EXPECT_TRUE(widened.equal(weight.to(at::kFloat)));
}

TEST(WeightStream, CanBeUsedByThreads) {
  const WeightStream stream(at::kFloat, {});
  const at::Tensor x = at::ones({1});
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int rows = 1; rows <= 4; ++rows) {
    threads.emplace_back([&stream, &x, &wrong, rows] {
      const at::Tensor weight = half({rows * 16, 32});
      const at::Tensor wide = weight.to(at::kFloat);
      for (int i = 0; i < 500; ++i) wrong += !stream.widened(weight, x).equal(wide);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(stream.held().buffers, 4);
}

TEST(LargeWeight, TouchesNoOtherExpertThanTheOneAskedFor) {
  const WeightStream stream(at::kFloat, {});
  const at::Tensor x = at::ones({1}), stack = half({3, 4, 5});
  const LargeWeight whole{stack, {}, &stream};
  LargeWeight split{{}, {}, &stream};
  for (const at::Tensor& half_of_one : stack.view({6, 2, 5}).unbind(0)) {
    split.parts.push_back(half_of_one);
  }
  for (std::int64_t expert = 0; expert < 3; ++expert) {
    const at::Tensor expected = stack[expert].to(at::kFloat);
    for (const LargeWeight* weight : {&whole, &std::as_const(split)}) {
      const at::Tensor found = weight->expert(expert, 3, x);
      EXPECT_TRUE(found.equal(expected));
      EXPECT_EQ(address(found) % 64, expert * 80 % 64);  // as in one tensor of all
    }
  }
}

TEST(LargeWeight, IsTheTensorItselfWhereNothingStreams) {
  const at::Tensor x = at::ones({1}), matrix = half({3, 4});
  EXPECT_TRUE(LargeWeight{matrix}.matrix(x).is_same(matrix));
  const WeightStream stream(at::kBFloat16, {});
  EXPECT_TRUE((LargeWeight{matrix, {}, &stream}.matrix(x).is_same(matrix)));
}

TEST(LargeWeight, WidensTheRowsThatAreGathered) {
  const WeightStream stream(at::kFloat, {});
  const at::Tensor table = half({6, 4}), indices = at::arange(3).view({1, 3});
  const at::Tensor rows = LargeWeight{table, {}, &stream}.rows(indices);
  EXPECT_TRUE(rows.equal(table.narrow(0, 0, 3).to(at::kFloat).unsqueeze(0)));
  EXPECT_EQ(stream.held().buffers, 0);
}

// --- Read-ahead ----------------------------------------------------------------------------------

constexpr std::int64_t kBlockBytes = std::int64_t{1} << 20;

/// A file of some blocks, mapped, of which nothing is in memory.
struct ColdFile {
  explicit ColdFile(int blocks) {
    const auto path = folder.path() / "weights";
    std::ofstream(path, std::ios::binary) << std::string(blocks * kBlockBytes, 'x');
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    ::fsync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
    mapping = MappedFile::open(path);
  }
  std::byte* begin(int block) const { return mapping->data() + block * kBlockBytes; }
  at::Tensor weight(int block) const {
    return at::from_blob(begin(block), {kBlockBytes}, at::kByte);
  }

  /// Pages of a block that are in memory.
  int resident(int block) const {
    std::vector<unsigned char> pages(kBlockBytes / ::sysconf(_SC_PAGESIZE));
    EXPECT_EQ(::mincore(begin(block), kBlockBytes, pages.data()), 0);
    int count = 0;
    for (const unsigned char page : pages) count += page & 1;
    return count;
  }
  /// Whether all of a block comes into memory. Reading ahead is not waited for elsewhere.
  bool arrives(int block) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (resident(block) * ::sysconf(_SC_PAGESIZE) < kBlockBytes) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }

  TempFolder folder;
  std::shared_ptr<MappedFile> mapping;
};

TEST(WeightStream, AsksForTheBlockThatBeginsAndTheNextAndNoFurther) {
  const ColdFile file(6);
  if (file.resident(0) + file.resident(5) > 0) GTEST_SKIP() << "this folder lies in memory";
  const WeightStream stream(
      at::kFloat,
      {{file.weight(0)}, {file.weight(1)}, {file.weight(2), file.weight(3)}, {}, {file.weight(4)}});
  stream.enter(0);
  EXPECT_TRUE(file.arrives(0) && file.arrives(1));
  EXPECT_EQ(file.resident(2) + file.resident(3), 0);
  stream.enter(1);
  EXPECT_TRUE(file.arrives(2) && file.arrives(3));
  stream.enter(2);
  EXPECT_EQ(file.resident(4), 0);  // behind the gap
  stream.enter(4);
  EXPECT_TRUE(file.arrives(4));
  EXPECT_EQ(file.resident(5), 0);
}

}  // namespace
}  // namespace vlscope
