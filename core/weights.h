#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint.h"
#include "core/large_weight.h"

namespace vlscope {

/// One weight of a model: declared once, by the module that owns it.
struct WeightSpec {
  /// The module path, as transformers names it in memory: "model.visual.pos_embed.weight".
  std::string name;
  std::vector<int64_t> shape;
  /// Where load_weights puts the tensor. Not touched by count_weights.
  at::Tensor* slot = nullptr;
  /// The weight that serves in its place when none is stored: the embedding for a tied head. Empty
  /// for a weight that must be stored.
  std::string tied_to = {};
  /// Not empty for a weight `[experts, out, in]`: the matrices of all experts, which may be stored
  /// in three ways. As it is; with the last two axes exchanged, where that shape is another one; or
  /// expert by expert, "experts.3.gate_proj.weight" for "experts.gate_up_proj", in the parts that
  /// are named here and lie below each other in this order.
  std::vector<std::string> expert_parts = {};
  /// Not nullptr for a weight that may stay as it is stored; `slot` is then its `stored`.
  LargeWeight* large = nullptr;
};

/// The names of what load_weights puts into `large->parts` of experts that are stored one by one.
std::vector<std::string> expert_part_names(const WeightSpec& spec);

struct WeightCount {
  int64_t tensors = 0;
  int64_t parameters = 0;
};

/// What a checkpoint of these weights stores; tied weights are not counted.
WeightCount count_weights(const std::vector<WeightSpec>& specs);

/// The module path that a stored name stands for, over the spellings in circulation: `visual.*`,
/// `model.layers.*`, `model.embed_tokens.*` and `model.norm.*` of older files, and base models
/// saved without the leading `model.`. Idempotent; other names come back unchanged.
std::string canonical_weight_name(std::string_view stored);

struct LoadOptions {
  /// float32, bfloat16, float16 or float64. Without one, the stored dtype: the one that holds most
  /// of the model's parameters (the widest of equals). Weights stored otherwise are converted.
  std::optional<at::ScalarType> dtype = std::nullopt;
  at::Device device = at::kCPU;
  /// Where a weight goes, by its name; all to `device` if there is none.
  std::function<at::Device(const std::string&)> device_of = nullptr;
  /// Copies the weights into memory even where they could be used in place, for folders whose files
  /// may be overwritten or cut short while the model lives.
  bool copy = false;
  /// Leaves large weights as they are stored, mapped, whatever `dtype` is, which by default is
  /// float32. On the CPU only, and without `copy`.
  bool stream = false;
  std::function<std::string(std::string_view)> rename = canonical_weight_name;
};

/// What load_weights did. Names are stored names, in the order of the checkpoint; `tied` holds
/// names of specs.
struct LoadReport {
  at::ScalarType dtype = at::kFloat;
  /// Stored, and no part of the model.
  std::vector<std::string> ignored;
  /// Stored for multi-token prediction (`mtp.*`), a draft of further tokens that no forward runs.
  std::vector<std::string> unused;
  /// Stored in another dtype than the model's, and converted.
  std::vector<std::string> converted;
  /// Stored in another dtype than the model's, and left so.
  std::vector<std::string> streamed;
  /// Not stored; they share the tensor of the weight that they are tied to.
  std::vector<std::string> tied;
};

/// Fills the slot of every spec from `checkpoint`, and accounts for every stored tensor. A weight
/// that is stored in the wanted dtype is used in place on the CPU: no byte of it is read or copied,
/// but for experts that are stored one by one, which are copied into one tensor. Experts with their
/// axes exchanged are used in place through a transposed view. With `options.stream`, so are large
/// weights of any dtype, and experts that are stored one by one become a list.
/// A stored weight always wins over a tie. No weight requires grad.
///
/// Everything is checked, and every tensor made, before the first slot is written. Raises
/// CheckpointError naming file and tensor: no stored name fits, two fit one weight, a weight is
/// missing, has another shape, or a dtype other than F32, F16 and BF16, or the checkpoint holds the
/// scales of a quantisation. Other tensors that do not belong to the model are reported as ignored.
/// So does a file that was written to since `checkpoint` was opened.
/// Raises InputError where `options.dtype` is not a dtype that the model can run in, and where
/// `options.stream` goes with a device or with `copy`.
LoadReport load_weights(const std::vector<WeightSpec>& specs, const Checkpoint& checkpoint,
                        const LoadOptions& options = {});

}  // namespace vlscope
