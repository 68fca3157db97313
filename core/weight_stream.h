#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace vlscope {

/// What a model owns whose large weights stay as they are stored, mapped from the file: the buffers
/// in which a weight is widened (converted to the dtype of the forward) for one operation, and the
/// order in which the weights will be wanted from the disk. Any number of threads may use one.
class WeightStream {
 public:
  /// @param dtype of the forward
  /// @param blocks the weights of each block, as stored, in the order of the forward. An empty
  ///   entry is a gap: the block behind it is not asked for in advance.
  WeightStream(at::ScalarType dtype, std::vector<std::vector<at::Tensor>> blocks);

  at::ScalarType dtype() const { return dtype_; }

  /// `pieces`, matrices of one shape, below each other in the forward's dtype: contiguous, and
  /// `offset` bytes (modulo 64) behind a multiple of 64, for bits that depend on it. For an
  /// operation with `x`: its memory is used again as soon as nobody holds the tensor, unless a
  /// graph will keep it. Gradients reach pieces that require them.
  at::Tensor widened(at::TensorList pieces, const at::Tensor& x, std::size_t offset = 0) const;

  /// Tells that a block of the list begins: the next one is asked for from the disk, without
  /// waiting, and this one too if it has not been.
  void enter(int block) const;
  /// Asks for one weight.
  static void read_ahead(const at::Tensor& stored);

  struct Held {
    std::int64_t buffers = 0;
    std::int64_t bytes = 0;
  };
  /// The buffers that are there, in use or waiting: as many as threads have used at a time.
  Held held() const;

 private:
  class Buffers;

  at::ScalarType dtype_;
  std::vector<std::vector<at::Tensor>> blocks_;
  mutable std::atomic<int> asked_{-1};  ///< The last block that was asked for.
  /// Shared with the tensors made here, which a graph may hold longer than the model lives.
  std::shared_ptr<Buffers> buffers_;
};

}  // namespace vlscope
