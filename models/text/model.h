// The text model: embedding, blocks, final norm. Its blocks and its norm are the family's own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/inputs.h"
#include "models/text/decoder.h"

namespace vlscope {

/// Where a block of the text model is built: below whom, under which name, as which of the blocks.
struct BlockPlace {
  Module* parent;
  std::string name;
  std::size_t index;
};

/// What a family puts into the text model.
struct TextParts {
  std::unique_ptr<TextBlock> (*block)(BlockPlace place, const TextConfig& config, bool eager);
  std::unique_ptr<Leaf> (*norm)(Module* parent, std::string name, const TextConfig& config);
};

/// Blocks that are all of one class.
template <class Block>
std::unique_ptr<TextBlock> build_block(BlockPlace place, const TextConfig& config, bool eager) {
  return std::make_unique<Block>(place.parent, std::move(place.name), config, eager);
}

template <class Norm>
std::unique_ptr<Leaf> build_norm(Module* parent, std::string name, const TextConfig& config) {
  return std::make_unique<Norm>(parent, std::move(name), config.hidden_size, config.rms_norm_eps);
}

/// The blocks one after the other; after block k, DeepStack level k is added at the image and video
/// tokens, in families whose tower gives such levels.
class TextModel : public Module {
 public:
  struct Input {
    at::Tensor inputs_embeds;     ///< `[batch, seq, hidden]`
    at::Tensor attention_mask;    ///< `[batch, past + seq]`
    at::Tensor position_ids;      ///< `[3, batch, seq]`
    at::Tensor visual_pos_masks;  ///< `[batch, seq]` bool, or undefined: nothing is added
    at::Tensor visual_rows;       ///< The same as indices into `[batch * seq]`
    std::vector<at::Tensor> deepstack;
    Replay replay = {};
    KeyValueCache* cache = nullptr;  ///< Of a generation
    /// Holds the positions before those of a tail; the blocks look back at them and add nothing.
    std::shared_ptr<KeyValueCache> before = nullptr;
    bool last_alone = false;  ///< Of what leaves the blocks, the last position alone will be used.
  };
  TextModel(Module* parent, std::string name, const TextConfig& config, const TextParts& parts,
            bool eager);
  Flow<at::Tensor> operator()(Trace& trace, Input in) const;

  /// Makes room for `levels` DeepStack levels; without it no block has a `deepstack_output`.
  void add_deepstack(std::size_t levels);

  Embedding embed_tokens;
  std::vector<std::unique_ptr<TextBlock>> layers;
  std::unique_ptr<Leaf> norm;
  TextRotary rotary_emb;
  std::vector<std::unique_ptr<Location>> deepstack_outputs;  ///< On the first layers, one a level.

 private:
  at::Tensor mask(const Input& in) const;
  at::Tensor padding(const Input& in) const;
  const Location& end_of(std::size_t block, const Input& in) const;
  bool nobody_sees_the_rest(const Trace& trace, std::size_t block, const Input& in) const;
  bool eager_;
};

/// `x` with `features` in place of the rows `rows` of its flattened `[batch * seq, hidden]`.
at::Tensor put_rows(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& features);

}  // namespace vlscope
