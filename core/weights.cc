#include "core/weights.h"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "core/errors.h"
#include "core/text.h"

namespace vlscope {
namespace {

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

/// Whether a tensor of this name tells how another one is packed or scaled: without it, the other
/// one's numbers mean something else. Names of FP8, compressed-tensors, GPTQ, AWQ and bitsandbytes.
bool is_quantisation_part(std::string_view name) {
  for (const std::string_view part :
       {"_scale", "_zero_point", "quant_state", "quant_map", "absmax"}) {
    if (name.find(part) != std::string_view::npos) return true;
  }
  const std::string_view leaf = name.substr(name.rfind('.') + 1);
  for (const std::string_view whole :
       {"qweight", "qzeros", "scales", "scale", "zeros", "g_idx", "weight_packed", "SCB"}) {
    if (leaf == whole) return true;
  }
  return false;
}

int64_t numel(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

bool is_weight_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

/// Resolves specs against one checkpoint; each step throws before anything is changed.
class Loader {
 public:
  Loader(const std::vector<WeightSpec>& specs, const Checkpoint& checkpoint,
         const LoadOptions& options)
      : specs_(specs), checkpoint_(checkpoint), options_(options) {}

  LoadReport run() {
    resolve_names();
    require_any_match();
    for (const WeightSpec& spec : specs_) check_dtype(spec);
    refuse_quantisation();
    for (const WeightSpec& spec : specs_) check_presence(spec);
    for (const WeightSpec& spec : specs_) check_shape(spec);
    report_.dtype = options_.dtype ? *options_.dtype : stored_dtype();
    fill(make_tensors());
    return std::move(report_);
  }

 private:
  [[noreturn]] void fail(const std::string& stored, const std::string& reason) const {
    throw CheckpointError(
        fmt::format("{}: tensor \"{}\" {}", checkpoint_.file(stored).string(), stored, reason));
  }

  /// The stored name of a weight, nullptr where none is.
  const std::string* stored_name(const std::string& name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? nullptr : &found->second;
  }

  void resolve_names() {
    std::unordered_set<std::string_view> expected;
    for (const WeightSpec& spec : specs_) expected.insert(spec.name);
    for (const std::string& stored : checkpoint_.names()) {
      std::string name = options_.rename(stored);
      if (expected.count(name) == 0) {
        (stored.starts_with("mtp.") ? report_.unused : report_.ignored).push_back(stored);
        continue;
      }
      const auto [place, added] = stored_.try_emplace(std::move(name), stored);
      if (!added) {
        fail(stored,
             fmt::format("stands for {}, and so does \"{}\" in {}; keep one of them", place->first,
                         place->second, checkpoint_.file(place->second).string()));
      }
    }
  }

  void require_any_match() const {
    if (!stored_.empty() || specs_.empty()) return;
    fail(report_.ignored.empty() ? report_.unused.front() : report_.ignored.front(),
         fmt::format("is no weight of this model, nor is any other of the {} stored; a name such "
                     "as \"{}\" was expected. Another prefix, or another model?",
                     report_.ignored.size() + report_.unused.size(), specs_.front().name));
  }

  void check_dtype(const WeightSpec& spec) const {
    const std::string* stored = stored_name(spec.name);
    if (stored == nullptr) return;
    const TensorInfo& info = checkpoint_.info(*stored);
    if (info.scalar_type && is_weight_dtype(*info.scalar_type)) return;
    fail(*stored, fmt::format("is stored as {} with shape [{}]; weights must be F32, F16 or BF16 "
                              "(quantised checkpoints are not read)",
                              info.dtype, fmt::join(info.shape, ", ")));
  }

  void refuse_quantisation() const {
    for (const std::string& stored : report_.ignored) {
      if (is_quantisation_part(stored)) {
        fail(stored,
             "belongs to a quantisation, without which the stored weights mean something "
             "else; load an unquantised checkpoint");
      }
    }
  }

  void check_presence(const WeightSpec& spec) const {
    if (stored_name(spec.name) != nullptr) return;
    if (!spec.tied_to.empty() && stored_name(spec.tied_to) != nullptr) return;
    const auto missing = std::count_if(specs_.begin(), specs_.end(), [&](const WeightSpec& other) {
      return other.tied_to.empty() && stored_name(other.name) == nullptr;
    });
    std::string message = fmt::format(
        "{}: tensor \"{}\" of shape [{}] is not stored; {} of the model's {} weights are missing",
        checkpoint_.folder().string(), spec.name, fmt::join(spec.shape, ", "), missing,
        specs_.size());
    if (!report_.ignored.empty()) {
      message += fmt::format(", and {} stored tensors fit none, \"{}\" first",
                             report_.ignored.size(), report_.ignored.front());
    }
    throw CheckpointError(message);
  }

  void check_shape(const WeightSpec& spec) const {
    const std::string* stored = stored_name(spec.name);
    if (stored == nullptr || checkpoint_.info(*stored).shape == spec.shape) return;
    fail(*stored, fmt::format("has shape [{}], the config asks for [{}]",
                              fmt::join(checkpoint_.info(*stored).shape, ", "),
                              fmt::join(spec.shape, ", ")));
  }

  /// The dtype that holds most parameters; the widest of equals, of two equally wide the first
  /// in the list.
  at::ScalarType stored_dtype() const {
    std::map<at::ScalarType, int64_t> parameters;
    for (const WeightSpec& spec : specs_) {
      const std::string* stored = stored_name(spec.name);
      if (stored != nullptr)
        parameters[*checkpoint_.info(*stored).scalar_type] += numel(spec.shape);
    }
    const auto candidates = {at::kFloat, at::kBFloat16, at::kHalf};
    return *std::max_element(
        candidates.begin(), candidates.end(),
        [&](at::ScalarType a, at::ScalarType b) { return parameters[a] < parameters[b]; });
  }

  std::unordered_map<std::string_view, at::Tensor> make_tensors() {
    // A weight needs a version counter, whatever mode the caller is in.
    const c10::InferenceMode off(false);
    std::unordered_map<std::string_view, at::Tensor> tensors;
    for (const WeightSpec& spec : specs_) {
      const std::string* stored = stored_name(spec.name);
      if (stored == nullptr) continue;
      const at::Tensor tensor = checkpoint_.tensor(*stored);
      if (tensor.scalar_type() != report_.dtype) report_.converted.push_back(*stored);
      tensors.emplace(spec.name, tensor.to(options_.device, report_.dtype, /*non_blocking=*/false,
                                           /*copy=*/options_.copy));
    }
    return tensors;
  }

  void fill(const std::unordered_map<std::string_view, at::Tensor>& tensors) {
    for (const WeightSpec& spec : specs_) {
      const bool tied = tensors.count(spec.name) == 0;
      if (tied) report_.tied.push_back(spec.name);
      *spec.slot = tensors.at(tied ? spec.tied_to : spec.name);
    }
  }

  const std::vector<WeightSpec>& specs_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  std::unordered_map<std::string, std::string> stored_;  // by canonical name
  LoadReport report_;
};

}  // namespace

WeightCount count_weights(const std::vector<WeightSpec>& specs) {
  WeightCount count;
  for (const WeightSpec& spec : specs) {
    if (!spec.tied_to.empty()) continue;
    ++count.tensors;
    count.parameters += numel(spec.shape);
  }
  return count;
}

std::string canonical_weight_name(std::string_view stored) {
  std::string_view path = stored;
  if (path.starts_with("model.")) path.remove_prefix(6);
  if (starts_with_any(path, {"visual.", "language_model."})) return fmt::format("model.{}", path);
  if (starts_with_any(path, {"layers.", "embed_tokens.", "norm."})) {
    return fmt::format("model.language_model.{}", path);
  }
  return std::string(stored);
}

LoadReport load_weights(const std::vector<WeightSpec>& specs, const Checkpoint& checkpoint,
                        const LoadOptions& options) {
  if (options.dtype && !is_weight_dtype(*options.dtype) && *options.dtype != at::kDouble) {
    throw InputError(fmt::format(
        "dtype {} is not one that a model runs in: float32, bfloat16, float16 or float64",
        dtype_text(*options.dtype)));
  }
  return Loader(specs, checkpoint, options).run();
}

}  // namespace vlscope
