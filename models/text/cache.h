// What a model remembers of the tokens before: the keys and values of every attention block, the
// state of every recurrent one.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace vlscope {

/// What a recurrent block carries from one token to the next.
struct RecurrentState {
  at::Tensor taps;             ///< The last inputs of its convolution, `[batch, channels, kernel]`
  at::Tensor state;            ///< `[batch, heads, key, value]`
  std::int64_t positions = 0;  ///< How many tokens it has seen.
};

/// Keys and values of one block, `[batch, kv_heads, positions, head_dim]`. Grows at the end of the
/// positions, into room made for the whole generation at once. A recurrent block has its state here
/// instead.
class BlockCache {
 public:
  /// @param capacity positions to make room for.
  explicit BlockCache(std::int64_t capacity) : capacity_(capacity) {}

  /// Positions held as keys and values.
  std::int64_t length() const { return keys_.defined() ? keys_.size(2) : 0; }
  /// Puts `k` and `v` behind what is held.
  void append(const at::Tensor& k, const at::Tensor& v);
  /// Puts `k` and `v` in place of all that is held.
  void replace(const at::Tensor& k, const at::Tensor& v);
  /// The same with what another holds, which edits of this one do not reach.
  void replace(const BlockCache& other);
  const at::Tensor& keys() const { return keys_; }
  const at::Tensor& values() const { return values_; }
  /// Every tensor held.
  std::vector<at::Tensor> tensors() const;

  RecurrentState recurrent;

 private:
  void make_room(std::int64_t positions);

  std::int64_t capacity_;
  at::Tensor keys_, values_;  ///< All positions: parts of the rooms, or tensors of their own.
  at::Tensor key_room_, value_room_;  ///< Undefined until the first append.
};

/// Refuses a later step of a block that does not hold (`what`: "keys of", "state behind") all
/// positions before it.
/// @throws InputError naming the block, both numbers, and what to do.
void check_follows(const std::string& block, const char* what, std::int64_t held,
                   std::int64_t past);

/// One BlockCache for each text block.
class KeyValueCache {
 public:
  KeyValueCache(std::size_t blocks, std::int64_t capacity)
      : blocks_(blocks, BlockCache(capacity)) {}
  explicit KeyValueCache(std::vector<BlockCache> blocks) : blocks_(std::move(blocks)) {}
  BlockCache& block(std::size_t k) { return blocks_.at(k); }
  std::size_t size() const { return blocks_.size(); }

 private:
  std::vector<BlockCache> blocks_;
};

}  // namespace vlscope
