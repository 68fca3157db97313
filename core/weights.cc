#include "core/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/device.h"
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

/// One tensor that a weight is stored as, or in parts of.
struct Piece {
  std::string name;
  std::vector<int64_t> shape;
};

/// The pieces of experts that are stored one by one: expert after expert, part after part.
std::vector<Piece> expert_pieces(const WeightSpec& spec) {
  std::vector<Piece> pieces;
  if (spec.expert_parts.empty()) return pieces;
  const std::string experts = spec.name.substr(0, spec.name.rfind('.'));
  const int64_t rows = spec.shape[1] / static_cast<int64_t>(spec.expert_parts.size());
  for (int64_t expert = 0; expert < spec.shape[0]; ++expert) {
    for (const std::string& part : spec.expert_parts) {
      pieces.push_back({fmt::format("{}.{}.{}", experts, expert, part), {rows, spec.shape[2]}});
    }
  }
  return pieces;
}

std::vector<int64_t> exchanged(std::vector<int64_t> shape) {
  std::swap(shape[1], shape[2]);
  return shape;
}

/// Resolves specs against one checkpoint; each step throws before anything is changed.
class Loader {
 public:
  Loader(const std::vector<WeightSpec>& specs, const Checkpoint& checkpoint,
         const LoadOptions& options)
      : specs_(specs), checkpoint_(checkpoint), options_(options) {}

  LoadReport run() {
    check_options();
    resolve_names();
    require_any_match();
    for (const WeightSpec& spec : specs_) check_one_form(spec);
    for_each_stored([this](const WeightSpec&, const Piece& piece) { check_dtype(piece); });
    refuse_quantisation();
    for (const WeightSpec& spec : specs_) check_presence(spec);
    for_each_stored(
        [this](const WeightSpec& spec, const Piece& piece) { check_shape(spec, piece); });
    report_.dtype = options_.dtype ? *options_.dtype : default_dtype();
    auto tensors = make_tensors();
    // What was converted or copied was read over some time.
    for (const auto& file : checkpoint_.files()) file->require_unchanged();
    fill(std::move(tensors));
    return std::move(report_);
  }

 private:
  [[noreturn]] void fail(const std::string& stored, const std::string& reason) const {
    throw CheckpointError(
        fmt::format("{}: tensor \"{}\" {}", checkpoint_.file(stored).string(), stored, reason));
  }

  void check_options() const {
    if (options_.dtype && !is_weight_dtype(*options_.dtype) && *options_.dtype != at::kDouble) {
      throw InputError(fmt::format(
          "dtype {} is not one that a model runs in: float32, bfloat16, float16 or float64",
          dtype_text(*options_.dtype)));
    }
    if (!options_.stream) return;
    if (options_.copy) {
      throw InputError("weights are to be streamed and copied as well; give one of the two");
    }
    for (const WeightSpec& spec : specs_) {
      if (device_of(spec).is_cpu()) continue;
      throw InputError(fmt::format(
          "weights are to be streamed, and {} to lie on {}; a model streams on the CPU alone",
          spec.name, device_of(spec).str()));
    }
  }

  /// The stored name of a weight, nullptr where none is.
  const std::string* stored_name(const std::string& name) const {
    const auto found = stored_.find(name);
    return found == stored_.end() ? nullptr : &found->second;
  }

  /// Whether the experts of this weight are stored one by one, be it not all of them.
  bool is_split(const WeightSpec& spec) const {
    if (spec.expert_parts.empty() || stored_name(spec.name) != nullptr) return false;
    const std::vector<Piece> pieces = expert_pieces(spec);
    return std::any_of(pieces.begin(), pieces.end(),
                       [&](const Piece& piece) { return stored_name(piece.name) != nullptr; });
  }

  /// What the weight is to be made of.
  std::vector<Piece> pieces(const WeightSpec& spec) const {
    if (is_split(spec)) return expert_pieces(spec);
    return {{spec.name, spec.shape}};
  }

  template <class Visit>
  void for_each_stored(Visit visit) const {
    for (const WeightSpec& spec : specs_) {
      for (const Piece& piece : pieces(spec)) {
        if (stored_name(piece.name) != nullptr) visit(spec, piece);
      }
    }
  }

  void resolve_names() {
    std::unordered_set<std::string> expected;
    for (const WeightSpec& spec : specs_) {
      expected.insert(spec.name);
      for (Piece& piece : expert_pieces(spec)) expected.insert(std::move(piece.name));
    }
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

  void check_one_form(const WeightSpec& spec) const {
    if (stored_name(spec.name) == nullptr) return;
    for (const Piece& piece : expert_pieces(spec)) {
      if (const std::string* part = stored_name(piece.name)) {
        fail(*part, fmt::format("is a part of {}, which is stored as a whole as well; keep one of "
                                "the two forms",
                                spec.name));
      }
    }
  }

  void check_dtype(const Piece& piece) const {
    const std::string& stored = *stored_name(piece.name);
    const TensorInfo& info = checkpoint_.info(stored);
    if (info.scalar_type && is_weight_dtype(*info.scalar_type)) return;
    fail(stored, fmt::format("is stored as {} with shape [{}]; weights must be F32, F16 or BF16 "
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

  const Piece* missing_piece(const std::vector<Piece>& pieces) const {
    for (const Piece& piece : pieces) {
      if (stored_name(piece.name) == nullptr) return &piece;
    }
    return nullptr;
  }

  bool is_complete(const WeightSpec& spec) const {
    if (missing_piece(pieces(spec)) == nullptr) return true;
    return !spec.tied_to.empty() && stored_name(spec.tied_to) != nullptr;
  }

  void check_presence(const WeightSpec& spec) const {
    if (is_complete(spec)) return;
    const std::vector<Piece> wanted = pieces(spec);
    const Piece& piece = *missing_piece(wanted);
    const auto missing = std::count_if(specs_.begin(), specs_.end(), [&](const WeightSpec& other) {
      return other.tied_to.empty() && !is_complete(other);
    });
    std::string message = fmt::format(
        "{}: tensor \"{}\" of shape [{}] is not stored; {} of the model's {} weights are missing",
        checkpoint_.folder().string(), piece.name, fmt::join(piece.shape, ", "), missing,
        specs_.size());
    if (!report_.ignored.empty()) {
      message += fmt::format(", and {} stored tensors fit none, \"{}\" first",
                             report_.ignored.size(), report_.ignored.front());
    }
    throw CheckpointError(message);
  }

  /// Whether the whole of this weight is stored with its last two axes exchanged. Where the two
  /// shapes are the same, it is taken as it is, as transformers does.
  bool is_exchanged(const WeightSpec& spec) const {
    const std::string* stored = stored_name(spec.name);
    if (spec.expert_parts.empty() || stored == nullptr) return false;
    const auto& shape = checkpoint_.info(*stored).shape;
    return shape != spec.shape && shape == exchanged(spec.shape);
  }

  void check_shape(const WeightSpec& spec, const Piece& piece) const {
    const std::string& stored = *stored_name(piece.name);
    const auto& shape = checkpoint_.info(stored).shape;
    if (shape == piece.shape || is_exchanged(spec)) return;
    std::string asked = fmt::format("[{}]", fmt::join(piece.shape, ", "));
    if (!spec.expert_parts.empty() && !is_split(spec)) {
      asked += fmt::format(" or [{}]", fmt::join(exchanged(spec.shape), ", "));
    }
    fail(stored,
         fmt::format("has shape [{}], the config asks for {}", fmt::join(shape, ", "), asked));
  }

  at::ScalarType default_dtype() const { return options_.stream ? at::kFloat : stored_dtype(); }

  /// The dtype that holds most parameters; the widest of equals, of two equally wide the first
  /// in the list.
  at::ScalarType stored_dtype() const {
    std::map<at::ScalarType, int64_t> parameters;
    for_each_stored([&](const WeightSpec&, const Piece& piece) {
      parameters[*checkpoint_.info(*stored_name(piece.name)).scalar_type] += numel(piece.shape);
    });
    const auto candidates = {at::kFloat, at::kBFloat16, at::kHalf};
    return *std::max_element(
        candidates.begin(), candidates.end(),
        [&](at::ScalarType a, at::ScalarType b) { return parameters[a] < parameters[b]; });
  }

  bool streams(const WeightSpec& spec) const { return options_.stream && spec.large != nullptr; }

  /// The tensor over the mapped bytes; notes where it is not of the model's dtype.
  at::Tensor mapped(const WeightSpec& spec, const Piece& piece) {
    const std::string& stored = *stored_name(piece.name);
    at::Tensor tensor = checkpoint_.tensor(stored);
    if (tensor.scalar_type() != report_.dtype) {
      (streams(spec) ? report_.streamed : report_.converted).push_back(stored);
    }
    return tensor;
  }

  at::Device device_of(const WeightSpec& spec) const {
    return options_.device_of ? options_.device_of(spec.name) : options_.device;
  }

  Uploader& upload(at::Device device) {
    return uploaders_.try_emplace(device.str(), device).first->second;
  }

  /// Experts that are stored one by one, as one tensor.
  at::Tensor stacked(const WeightSpec& spec) {
    const at::Device device = device_of(spec);
    at::Tensor whole = at::empty(spec.shape, at::TensorOptions(device).dtype(report_.dtype));
    const std::vector<Piece> parts = expert_pieces(spec);
    at::Tensor rows = whole.view({static_cast<int64_t>(parts.size()), -1, spec.shape[2]});
    for (std::size_t i = 0; i < parts.size(); ++i) {
      upload(device)(mapped(spec, parts[i]), rows[static_cast<int64_t>(i)]);
    }
    return whole;
  }

  /// The same experts, each as it is.
  std::vector<at::Tensor> listed(const WeightSpec& spec) {
    std::vector<at::Tensor> parts;
    for (const Piece& piece : expert_pieces(spec)) parts.push_back(mapped(spec, piece));
    return parts;
  }

  at::Tensor whole(const WeightSpec& spec) {
    const at::Tensor tensor = mapped(spec, {spec.name, spec.shape});
    if (streams(spec)) return is_exchanged(spec) ? tensor.transpose(1, 2) : tensor;
    const at::Device device = device_of(spec);
    if (!is_exchanged(spec)) {
      if (!device.is_cpu()) return upload(device)(tensor, report_.dtype);
      return tensor.to(report_.dtype, /*non_blocking=*/false, options_.copy);
    }
    const at::Tensor view = tensor.transpose(1, 2);
    const bool in_place =
        !options_.copy && device.is_cpu() && report_.dtype == tensor.scalar_type();
    return in_place ? view : upload(device)(view, report_.dtype);
  }

  /// A weight: one tensor, or the parts of one.
  struct Made {
    at::Tensor whole = {};
    std::vector<at::Tensor> parts = {};
  };

  std::unordered_map<std::string_view, Made> make_tensors() {
    // A weight needs a version counter, whatever mode the caller is in.
    const c10::InferenceMode off(false);
    std::unordered_map<std::string_view, Made> made;
    for (const WeightSpec& spec : specs_) {
      if (is_split(spec)) {
        made.emplace(spec.name, streams(spec) ? Made{{}, listed(spec)} : Made{stacked(spec)});
      } else if (stored_name(spec.name) != nullptr) {
        made.emplace(spec.name, Made{whole(spec)});
      }
    }
    return made;
  }

  void fill(std::unordered_map<std::string_view, Made> made) {
    for (const WeightSpec& spec : specs_) {
      const bool tied = made.count(spec.name) == 0;
      if (tied) report_.tied.push_back(spec.name);
      Made& weight = made.at(tied ? spec.tied_to : spec.name);
      *spec.slot = weight.whole;
      if (spec.large) spec.large->parts = std::move(weight.parts);
    }
  }

  const std::vector<WeightSpec>& specs_;
  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  std::map<std::string, Uploader> uploaders_;            // by device
  std::unordered_map<std::string, std::string> stored_;  // by canonical name
  LoadReport report_;
};

}  // namespace

std::vector<std::string> expert_part_names(const WeightSpec& spec) {
  std::vector<std::string> names;
  for (Piece& piece : expert_pieces(spec)) names.push_back(std::move(piece.name));
  return names;
}

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
  return Loader(specs, checkpoint, options).run();
}

}  // namespace vlscope
