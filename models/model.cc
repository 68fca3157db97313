#include "models/model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "core/device.h"
#include "core/errors.h"
#include "core/logging.h"
#include "core/ops/shape_rules.h"
#include "core/text.h"
#include "models/least.h"
#include "models/qwen2_5_vl.h"
#include "models/qwen2_vl.h"
#include "models/qwen3_5.h"
#include "models/qwen3_vl.h"
#include "models/qwen3_vl_moe.h"

namespace vlscope {
namespace {

using Builder = std::unique_ptr<CausalLM> (*)(const Config&, Attention);

template <class Family>
std::unique_ptr<CausalLM> build_family(const Config& config, Attention attention) {
  return std::make_unique<Family>(config, attention);
}

const std::map<std::string, Builder>& families() {
  static const std::map<std::string, Builder> families = {
      {"qwen2_vl", build_family<Qwen2VL>}, {"qwen2_5_vl", build_family<Qwen25VL>},
      {"qwen3_vl", build_family<Qwen3VL>}, {"qwen3_vl_moe", build_family<Qwen3VLMoe>},
      {"qwen3_5", build_family<Qwen3_5>},  {"qwen3_5_moe", build_family<Qwen3_5Moe>},
  };
  return families;
}

struct Owned {
  const Module* module;
  const Parameter* parameter;
};

/// The large weights of a tree that has been numbered, in the order of the forward.
std::vector<Owned> large_weights(const Tree& tree) {
  std::vector<Owned> found;
  for (const Module* module : tree.modules()) {
    for (const Parameter& parameter : module->parameters()) {
      if (parameter.large) found.push_back({module, &parameter});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Owned& a, const Owned& b) {
    return a.module->input.order() < b.module->input.order();
  });
  return found;
}

/// Whether the forward reads all of a weight: not the rows of a table, nor the experts.
bool is_read_ahead(const Module& module, const Parameter& parameter) {
  return parameter.expert_parts.empty() && &module.kind() != &kinds::embedding;
}

/// The block that a module belongs to; of what stands outside of them, the module above it.
const Module* block_of(const Module& module) {
  for (const Module* above = &module; above; above = above->parent()) {
    if (&above->kind() == &kinds::text_layer || &above->kind() == &kinds::vision_layer) {
      return above;
    }
  }
  return module.parent();
}

/// Each location of a tree, and the one in the same place of another tree of the same config.
std::unordered_map<const Location*, const Location*> counterparts(const Tree& tree,
                                                                  const Tree& other) {
  std::unordered_map<const Location*, const Location*> found;
  for (std::size_t i = 0; i < tree.modules().size(); ++i) {
    const auto& from = tree.modules()[i]->locations();
    const auto& to = other.modules()[i]->locations();
    for (std::size_t j = 0; j < from.size(); ++j) found.emplace(from[j], to[j]);
  }
  return found;
}

}  // namespace

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& [name, builder] : families()) names.push_back(name);
  return names;
}

std::shared_ptr<Model> Model::build(const Config& config, Attention attention, bool text_only,
                                    std::optional<at::ScalarType> dtype) {
  const auto family = families().find(config.model_type);
  if (family == families().end()) {
    throw UnsupportedFamily(fmt::format("model_type \"{}\" is not served; these are: {}.",
                                        config.model_type, fmt::join(family_names(), ", ")));
  }
  const auto weights =
      at::device(at::kMeta).dtype(dtype.value_or(config.dtype.value_or(at::kFloat)));
  std::shared_ptr<Model> model(new Model(family->second(config, attention), attention, weights));
  model->number();
  if (text_only) {
    model->text_only_ = true;
    model->tree_->forbid_visual(
        "the model was loaded with task=\"text-generation\", without a processor. Load it with "
        "task=\"image-text-to-text\".");
  }
  return model;
}

Model::Model(std::unique_ptr<CausalLM> root, Attention attention, const at::TensorOptions& weights)
    : root_(std::move(root)),
      tree_(std::make_shared<Tree>(*root_)),
      attention_(attention),
      dtype_(c10::typeMetaToScalarType(weights.dtype())) {
  for (const WeightSpec& spec : this->weights()) *spec.slot = at::empty(spec.shape, weights);
  list_weights();
}

Model Model::like(const Config& config, const at::TensorOptions& weights) const {
  return Model(families().at(config.model_type)(config, attention_), attention_, weights);
}

void Model::number() {
  const Model least = like(least_config(config()), at::kFloat);
  for (at::Tensor* weight : least.weights_) weight->zero_();
  const auto own = counterparts(*least.tree_, *tree_);
  const auto visited = [&](bool with_image) {
    std::vector<const Location*> order;
    least.list(least_inputs(least.config(), with_image),
               [&](const Location& location, at::Tensor* const*, std::size_t) {
                 order.push_back(own.at(&location));
               });
    return order;
  };
  tree_->number(visited(false), visited(true));
}

void Model::list(Inputs inputs, const Trace::Visitor& visitor) const {
  Trace::Options options;
  options.visitor = visitor;
  inputs = checked(std::move(inputs), config());
  Trace trace(
      tree_, [&](Trace& running) { return root_->forward(running, std::move(inputs)); },
      std::move(options));
  trace.finish();
}

std::vector<WeightSpec> Model::weights() const {
  std::vector<WeightSpec> specs;
  for (const Module* module : tree_->modules()) {
    for (const Parameter& parameter : module->parameters()) {
      const std::string name = fmt::format("{}.{}", module->path(), parameter.name);
      const bool tied = module == &root_->lm_head && config().tie_word_embeddings;
      specs.push_back({name, parameter.shape, parameter.tensor,
                       tied ? "model.language_model.embed_tokens.weight" : "",
                       parameter.expert_parts, parameter.large});
    }
  }
  return specs;
}

LoadReport Model::load(const Checkpoint& checkpoint, const LoadOptions& options) {
  LoadReport report = load_weights(weights(), checkpoint, options);
  loaded_ = true;
  dtype_ = report.dtype;
  mapped_ = checkpoint.files();
  list_weights();
  if (options.stream) stream_weights();
  note_weights();
  return report;
}

void Model::list_weights() {
  weights_.clear();
  names_.clear();
  for (const WeightSpec& spec : weights()) {
    if (spec.large == nullptr || spec.large->parts.empty()) {
      weights_.push_back(spec.slot);
      names_.push_back(spec.name);
      continue;
    }
    for (at::Tensor& part : spec.large->parts) weights_.push_back(&part);
    for (std::string& name : expert_part_names(spec)) names_.push_back(std::move(name));
  }
}

void Model::stream_weights() {
  std::vector<std::vector<at::Tensor>> blocks;
  std::vector<LargeWeight*> all;
  const Module* last = nullptr;
  for (const auto& [module, parameter] : large_weights(*tree_)) {
    all.push_back(parameter->large);
    if (!is_read_ahead(*module, *parameter)) continue;
    if (const Module* block = block_of(*module); std::exchange(last, block) != block) {
      // The head is much, and not asked for before a reader of the logits has come to it.
      if (module == &root_->lm_head) blocks.emplace_back();
      parameter->large->block = static_cast<int>(blocks.size());
      blocks.emplace_back();
    }
    blocks.back().push_back(parameter->large->stored);
  }
  stream_ = std::make_unique<WeightStream>(dtype_, std::move(blocks));
  for (LargeWeight* weight : all) weight->stream = stream_.get();
}

void Model::to(at::Device device) {
  if (stream_ && !device.is_cpu()) {
    throw InputError(
        fmt::format("the weights are streamed from their file and cannot move to {}; a model "
                    "streams on the CPU alone. Load it without weights=\"stream\".",
                    device.str()));
  }
  require_unchanged_files();
  const c10::InferenceMode off(false);  // A weight needs a version counter.
  Uploader upload(device);
  // A tied head and its embedding are one tensor, and stay one.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> there;
  for (const at::Tensor* weight : weights_) {
    at::Tensor& moved_weight = there[weight->unsafeGetTensorImpl()];
    if (moved_weight.defined()) continue;
    const bool uploads = weight->is_cpu() && !device.is_cpu();
    moved_weight = uploads ? upload(*weight, weight->scalar_type()) : weight->to(device);
  }
  for (at::Tensor* weight : weights_) *weight = there.at(weight->unsafeGetTensorImpl());
  note_weights();
}

void Model::note_weights() {
  weight_versions_.clear();
  for (const at::Tensor* weight : weights_) weight_versions_.push_back(weight->_version());
  std::erase_if(mapped_, [&](const auto& file) {
    return std::none_of(weights_.begin(), weights_.end(), [&](const at::Tensor* weight) {
      return weight->is_cpu() && file->holds(weight->const_data_ptr());
    });
  });
}

void Model::require_unchanged_files() const {
  for (const auto& file : mapped_) file->require_unchanged();
}

at::Device Model::device() const { return weights_.front()->device(); }

void Model::note_weight_edits() {
  std::vector<std::size_t> edited;
  {
    const std::lock_guard lock(edits_);
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      const std::int64_t version = weights_[i]->_version();
      if (std::exchange(weight_versions_[i], version) != version) edited.push_back(i);
    }
  }
  // Without the lock: whoever receives the message may wait for another (Python's).
  for (const std::size_t i : edited) {
    log().warn("{} has been edited in place; this model uses it as edited from now on.", names_[i]);
  }
}

std::unique_ptr<Trace> Model::trace(Inputs inputs) {
  if (!loaded_) throw Error("the model has no weights yet: load them before tracing.");
  require_unchanged_files();
  Trace::Options options;
  options.later_step = inputs.cache && inputs.past() > 0;
  options.images = inputs.pixel_values.defined();
  options.videos = inputs.pixel_values_videos.defined();
  if (text_only_ && (options.images || options.videos)) {
    throw InputError(
        fmt::format("{} were given to a model loaded with task=\"text-generation\". Load it with "
                    "task=\"image-text-to-text\".",
                    options.images ? "images" : "videos"));
  }
  options.foreign = {inputs.input_ids,           inputs.attention_mask, inputs.pixel_values,
                     inputs.pixel_values_videos, inputs.image_grid_thw, inputs.video_grid_thw,
                     inputs.second_per_grid_ts};
  if (const auto& recorded = inputs.replay.from) {
    // Streams are copied where a block begins, keys and values where they are joined.
    options.foreign.push_back(recorded->vision.merged);
    const std::vector<at::Tensor>& levels = recorded->vision.deepstack;
    options.foreign.insert(options.foreign.end(), levels.begin(), levels.end());
  }
  check_pixels_hold_data(inputs);
  inputs = checked(std::move(inputs), config());
  options.batch = inputs.input_ids.size(0);
  if (inputs.replay.tail) {
    options.batch = inputs.replay.tail->copies;
    options.start = &root_->tail_start();
  }
  return std::make_unique<Trace>(
      tree_,
      [self = shared_from_this(), inputs = std::move(inputs)](Trace& running) {
        return self->run(running, inputs);
      },
      std::move(options));
}

Flow<at::Tensor> Model::run(Trace& trace, Inputs inputs) {
  note_weight_edits();
  co_return co_await root_->forward(trace, std::move(inputs));
}

Inputs Model::generation_prompt(Inputs inputs, std::int64_t capacity) const {
  return vlscope::generation_prompt(std::move(inputs), config(), capacity);
}

std::shared_ptr<Recording> Model::record(Inputs inputs, bool keys) {
  const at::NoGradGuard no_grad;
  auto recording = std::make_shared<Recording>();
  inputs.logits_to_keep = 1;
  inputs.replay = {nullptr, recording};
  if (keys) {
    const auto blocks = static_cast<std::size_t>(config().text.num_hidden_layers);
    inputs.cache = recording->keys = std::make_shared<KeyValueCache>(blocks, 0);
  }
  forward(std::move(inputs));
  return recording;
}

std::int64_t Model::weight_version() const {
  std::int64_t version = 0;
  for (const at::Tensor* weight : weights_) version += weight->_version();
  return version;
}

at::Tensor Model::forward(Inputs inputs) { return trace(std::move(inputs))->finish(); }

at::Tensor Model::project_on_vocab(const at::Tensor& hidden) const {
  const std::int64_t width = config().text.hidden_size;
  if (hidden.dim() == 0 || hidden.size(-1) != width) {
    throw InputError(
        fmt::format("project_on_vocab takes [..., {}]; got {}.", width, shape_text(hidden)));
  }
  require_unchanged_files();
  return root_->project_on_vocab(hidden);
}

std::vector<ScannedValue> Model::scan(Inputs inputs) const {
  // Another tree, whose weights are shapes alone whatever this one holds. It needs no numbers: what
  // it visits is known here by its place.
  const Model shadow = like(config(), at::device(at::kMeta).dtype(dtype_));
  const auto own = counterparts(*shadow.tree_, *tree_);
  const ops::ShapeRules rules;
  std::vector<ScannedValue> values;
  for (at::Tensor* pixels : {&inputs.pixel_values, &inputs.pixel_values_videos}) {
    if (pixels->defined()) *pixels = pixels->to(at::kMeta);
  }
  shadow.list(std::move(inputs),
              [&](const Location& location, at::Tensor* const* live, std::size_t count) {
                for (std::size_t slot = 0; slot < count; ++slot) {
                  if (!live[slot]->defined()) continue;
                  values.push_back({own.at(&location), static_cast<int>(slot),
                                    live[slot]->sizes().vec(), live[slot]->scalar_type()});
                }
              });
  return values;
}

}  // namespace vlscope
