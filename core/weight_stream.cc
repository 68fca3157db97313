#include "core/weight_stream.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/ops/precision.h"

namespace vlscope {
namespace {

/// What torch aligns its memory to.
constexpr std::size_t kAlignment = 64;
/// Of one call of madvise, Linux reads as much as a device's read-ahead: 128 KiB where nobody has
/// set another.
constexpr std::size_t kReadAhead = std::size_t{128} << 10;

struct Buffer {
  explicit Buffer(std::size_t bytes) : data(c10::GetCPUAllocator()->allocate(bytes)), size(bytes) {}
  c10::DataPtr data;
  std::size_t size;
};

bool any_requires_grad(at::TensorList pieces) {
  return std::any_of(pieces.begin(), pieces.end(),
                     [](const at::Tensor& piece) { return piece.requires_grad(); });
}

}  // namespace

/// Buffers that wait to be used again.
class WeightStream::Buffers {
 public:
  /// One of at least so many bytes. Too small a one is exchanged for a larger, so that there are
  /// never more than are used at a time.
  std::shared_ptr<Buffer> borrow(std::size_t bytes) {
    std::shared_ptr<Buffer> buffer = take(bytes);
    if (buffer && buffer->size >= bytes) return buffer;
    buffer.reset();  // Before there is another.
    buffer = std::make_shared<Buffer>(bytes);
    const std::lock_guard lock(mutex_);
    count(*buffer, 1);
    return buffer;
  }

  void give_back(std::shared_ptr<Buffer> buffer) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(buffer));
  }

  Held held() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }

 private:
  /// The smallest that is large enough, else the largest, which then counts no more; nullptr if
  /// none waits.
  std::shared_ptr<Buffer> take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return nullptr;
    const auto best =
        std::min_element(waiting_.begin(), waiting_.end(), [bytes](const auto& a, const auto& b) {
          const bool fits = a->size >= bytes, other_fits = b->size >= bytes;
          if (fits != other_fits) return fits;
          return fits ? a->size < b->size : a->size > b->size;
        });
    std::shared_ptr<Buffer> buffer = std::move(*best);
    waiting_.erase(best);
    if (buffer->size < bytes) count(*buffer, -1);
    return buffer;
  }

  void count(const Buffer& buffer, int change) {
    held_.buffers += change;
    held_.bytes += change * static_cast<std::int64_t>(buffer.size);
  }

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Buffer>> waiting_;
  Held held_;
};

WeightStream::WeightStream(at::ScalarType dtype, std::vector<std::vector<at::Tensor>> blocks)
    : dtype_(dtype), blocks_(std::move(blocks)), buffers_(std::make_shared<Buffers>()) {}

WeightStream::Held WeightStream::held() const { return buffers_->held(); }

at::Tensor WeightStream::widened(at::TensorList pieces, const at::Tensor& x,
                                 std::size_t offset) const {
  if (at::GradMode::is_enabled() && any_requires_grad(pieces)) return at::cat(pieces).to(dtype_);

  std::vector<std::int64_t> shape = pieces.front().sizes().vec();
  const std::int64_t rows = shape.front();
  shape.front() *= static_cast<std::int64_t>(pieces.size());
  offset %= kAlignment;
  const std::size_t bytes = offset + c10::multiply_integers(shape) * c10::elementSize(dtype_);
  // A graph keeps what multiplies a tensor that requires grad. Such memory goes with the graph:
  // were it used again, as much would stay as the whole model takes.
  const bool kept = ops::records_graph(x);
  auto buffer = kept ? std::make_shared<Buffer>(bytes) : buffers_->borrow(bytes);
  void* const place = static_cast<std::byte*>(buffer->data.get()) + offset;
  auto pool = kept ? nullptr : buffers_;
  at::Tensor whole = at::from_blob(
      place, shape,
      [pool = std::move(pool), buffer = std::move(buffer)](void*) {
        if (pool) pool->give_back(buffer);
      },
      at::TensorOptions(dtype_));
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    whole.narrow(0, static_cast<std::int64_t>(i) * rows, rows).copy_(pieces[i]);
  }
  return whole;
}

void WeightStream::enter(int block) const {
  const auto ask = [&](int index) {
    if (index == static_cast<int>(blocks_.size())) return;
    for (const at::Tensor& stored : blocks_[index]) read_ahead(stored);
  };
  // Two threads may ask twice or leave a block to the other: it is advice.
  if (asked_.exchange(block + 1) != block) ask(block);
  ask(block + 1);
}

void WeightStream::read_ahead(const at::Tensor& stored) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  auto* const data = static_cast<std::byte*>(const_cast<void*>(stored.const_data_ptr()));
  const std::size_t behind =
      reinterpret_cast<std::uintptr_t>(data) % page;  // The page's beginning.
  const std::size_t bytes = behind + stored.nbytes();
  for (std::size_t at = 0; at < bytes; at += kReadAhead) {
    ::madvise(data - behind + at, std::min(kReadAhead, bytes - at), MADV_WILLNEED);
  }
}

}  // namespace vlscope
