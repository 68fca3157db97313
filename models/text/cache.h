// What a model remembers of the tokens before: the keys and values of every text block.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace vlscope {

/// Keys and values of one block, `[batch, kv_heads, positions, head_dim]`. Grows at the end of the
/// positions, into room made for the whole generation at once.
class BlockCache {
 public:
  /// @param capacity positions to make room for.
  explicit BlockCache(std::int64_t capacity) : capacity_(capacity) {}

  /// Positions held.
  std::int64_t length() const { return keys_.defined() ? keys_.size(2) : 0; }
  /// Puts `k` and `v` behind what is held.
  void append(const at::Tensor& k, const at::Tensor& v);
  /// Puts `k` and `v` in place of all that is held.
  void replace(const at::Tensor& k, const at::Tensor& v);
  void replace(const BlockCache& other) { replace(other.keys_, other.values_); }
  const at::Tensor& keys() const { return keys_; }
  const at::Tensor& values() const { return values_; }

 private:
  void make_room(std::int64_t positions);

  std::int64_t capacity_;
  at::Tensor keys_, values_;  ///< All positions: parts of the rooms, or tensors of their own.
  at::Tensor key_room_, value_room_;  ///< Undefined until the first append.
};

/// One BlockCache for each text block.
class KeyValueCache {
 public:
  KeyValueCache(std::size_t blocks, std::int64_t capacity)
      : blocks_(blocks, BlockCache(capacity)) {}
  BlockCache& block(std::size_t k) { return blocks_.at(k); }
  std::size_t size() const { return blocks_.size(); }

 private:
  std::vector<BlockCache> blocks_;
};

}  // namespace vlscope
