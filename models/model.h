// A loaded model: the module tree of its family, numbered, and its weights.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/weight_stream.h"
#include "core/weights.h"
#include "models/causal_lm.h"

namespace vlscope {

/// What one location offers, as known without weights or compute.
struct ScannedValue {
  const Location* location;
  int slot;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype;
};

/// A model that traces run on. Threads may share it after `load`; it must be owned by a shared_ptr,
/// which its traces hold too.
class Model : public std::enable_shared_from_this<Model> {
 public:
  /// Builds the module tree and numbers its locations. Weights are on the meta device until `load`.
  /// @param dtype what the weights will be loaded in; else what the config says
  /// @throws UnsupportedFamily if no family has the config's model_type
  static std::shared_ptr<Model> build(const Config& config, Attention attention,
                                      bool text_only = false,
                                      std::optional<at::ScalarType> dtype = std::nullopt);

  /// Fills every weight from the checkpoint; see load_weights.
  LoadReport load(const Checkpoint& checkpoint, const LoadOptions& options);
  bool loaded() const { return loaded_; }
  /// Moves every weight to one device. No trace may be open.
  /// @throws InputError if the model streams its weights and the device is not the CPU
  void to(at::Device device);

  const Config& config() const { return root_->config(); }
  const Tree& tree() const { return *tree_; }
  Attention attention() const { return attention_; }
  at::Device device() const;
  /// What the forward runs in: that of the weights, but for large ones of a model that streams.
  at::ScalarType dtype() const { return dtype_; }
  /// The buffers in which a model that streams widens its weights; none in another.
  WeightStream::Held widening() const { return stream_ ? stream_->held() : WeightStream::Held(); }
  /// Every weight that a checkpoint of this model holds.
  std::vector<WeightSpec> weights() const;

  /// Opens a trace; nothing is computed yet. Once it runs, it logs the weights that were edited
  /// since the last one ran.
  /// @throws InputError if the inputs do not fit, before any compute
  std::unique_ptr<Trace> trace(Inputs inputs);
  /// The first step of a generation, for `trace`; see generation_prompt. Its last positions' logits
  /// give the tokens for `following`.
  Inputs generation_prompt(Inputs inputs, std::int64_t capacity) const;
  /// Runs the input once without gradients and keeps what later traces of it can start from.
  /// @param keys keeps every block's keys and values too.
  std::shared_ptr<Recording> record(Inputs inputs, bool keys);
  /// A number that changes with every edit of a weight.
  std::int64_t weight_version() const;
  /// The whole forward without stops: logits `[batch, kept, vocab]`.
  at::Tensor forward(Inputs inputs);
  /// Final norm and head on a stream `[..., hidden]`.
  at::Tensor project_on_vocab(const at::Tensor& hidden) const;
  /// Shape and dtype of every value for an input; computes nothing, and needs no weights.
  std::vector<ScannedValue> scan(Inputs inputs) const;

 private:
  Model(std::unique_ptr<CausalLM> root, Attention attention, const at::TensorOptions& weights);
  /// Another tree of this family, not numbered, with weights that hold nothing yet.
  Model like(const Config& config, const at::TensorOptions& weights) const;
  void number();
  Flow<at::Tensor> run(Trace& trace, Inputs inputs);
  void list(Inputs inputs, const Trace::Visitor& visitor) const;
  void note_weight_edits();
  /// What the weights hold now is what they are to be compared with.
  void note_weights();
  /// Lists the tensors that hold weights; of experts stored one by one, every part.
  void list_weights();
  /// From now on large weights are widened as they are used.
  void stream_weights();

  std::unique_ptr<CausalLM> root_;
  std::shared_ptr<Tree> tree_;
  Attention attention_;
  bool text_only_ = false;
  bool loaded_ = false;
  at::ScalarType dtype_;
  std::unique_ptr<WeightStream> stream_;
  std::vector<at::Tensor*> weights_;
  std::vector<std::string> names_;  ///< Of these.
  std::mutex edits_;                ///< Guards the line below.
  std::vector<std::int64_t>
      weight_versions_;  ///< Of each weight, when an edit was last looked for.
};

/// Names of the families that load, as config.json spells them.
std::vector<std::string> family_names();

}  // namespace vlscope
