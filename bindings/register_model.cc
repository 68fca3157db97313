// Python face of models/model.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <unordered_map>
#include <utility>

#include "bindings/register.h"
#include "bindings/running_trace.h"
#include "core/errors.h"
#include "core/logging.h"
#include "core/text.h"
#include "models/model.h"
#include "models/vision/windows.h"

namespace py = pybind11;

namespace vlscope {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

/// The tensors of one forward by name; None says the same as a name that is not there.
Inputs make_inputs(const std::map<std::string, MaybeTensor>& tensors, std::int64_t logits_to_keep) {
  const auto named = [&](const char* name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? at::Tensor() : found->second.value_or(at::Tensor());
  };
  Inputs inputs;
  inputs.input_ids = named("input_ids");
  inputs.attention_mask = named("attention_mask");
  inputs.pixel_values = named("pixel_values");
  inputs.pixel_values_videos = named("pixel_values_videos");
  inputs.image_grid_thw = named("image_grid_thw");
  inputs.video_grid_thw = named("video_grid_thw");
  inputs.second_per_grid_ts = named("second_per_grid_ts");
  inputs.logits_to_keep = logits_to_keep;
  return inputs;
}

Attention attention_by_name(const std::string& name) {
  if (name == "eager") return Attention::kEager;
  if (name == "sdpa") return Attention::kSdpa;
  throw ConfigError("attn_implementation is \"" + name + "\"; give \"eager\" or \"sdpa\".");
}

PatchEmbedding patch_embedding_by_name(const std::string& name) {
  if (name == "convolution") return PatchEmbedding::kConvolution;
  if (name == "matmul") return PatchEmbedding::kMatmul;
  throw ConfigError("patch_embedding is \"" + name + "\"; give \"convolution\" or \"matmul\".");
}

std::shared_ptr<Model> build(const std::string& config_json, const std::string& where,
                             const std::string& attention, const std::string& patch_embedding,
                             bool text_only, std::optional<at::ScalarType> dtype) {
  Config config = parse_config(config_json, where);
  config.vision.patch_embedding = patch_embedding_by_name(patch_embedding);
  for (const std::string& note : config.notes) log().warn("{}", note);
  return Model::build(config, attention_by_name(attention), text_only, dtype);
}

py::dict config_dict(const Config& config) {
  using namespace py::literals;
  const TextConfig& text = config.text;
  const VisionConfig& vision = config.vision;
  py::dict text_dict("num_layers"_a = text.num_hidden_layers, "hidden_size"_a = text.hidden_size,
                     "vocab_size"_a = text.vocab_size, "num_heads"_a = text.num_attention_heads,
                     "num_kv_heads"_a = text.num_key_value_heads, "head_dim"_a = text.head_dim,
                     "qk_head_dim"_a = text.head_dim,
                     "intermediate_size"_a = text.intermediate_size);
  if (const auto& mixture = text.mixture) {
    text_dict["num_experts"] = mixture->num_experts;
    text_dict["top_k"] = mixture->top_k;
    text_dict["moe_intermediate_size"] = mixture->intermediate_size;
  }
  py::dict vision_dict(
      "num_layers"_a = vision.depth, "vision_hidden_size"_a = vision.hidden_size,
      "hidden_size"_a = vision.hidden_size, "num_heads"_a = vision.num_heads,
      "head_dim"_a = vision.head_dim(), "intermediate_size"_a = vision.intermediate_size,
      "patch_size"_a = vision.patch_size, "temporal_patch_size"_a = vision.temporal_patch_size,
      "spatial_merge_size"_a = vision.spatial_merge_size, "window_size"_a = vision.window_size);
  if (vision.window_size == 0) vision_dict["window_size"] = py::none();
  return py::dict("model_type"_a = config.model_type, "text"_a = text_dict,
                  "vision"_a = vision_dict, "image_token_id"_a = config.image_token_id,
                  "video_token_id"_a = config.video_token_id, "text_card"_a = text_card(config),
                  "vision_card"_a = vision_card(config));
}

/// The tensors of a recording by the names that a file gives them.
std::map<std::string, at::Tensor> recorded_tensors(const Recording& recording) {
  std::map<std::string, at::Tensor> tensors;
  const auto add_all = [&](const char* name, const std::vector<at::Tensor>& list) {
    for (std::size_t k = 0; k < list.size(); ++k) tensors[fmt::format("{}.{}", name, k)] = list[k];
  };
  add_all("streams", recording.streams);
  add_all("deepstack", recording.vision.deepstack);
  if (recording.vision.merged.defined()) tensors["merged"] = recording.vision.merged;
  for (std::size_t k = 0; recording.keys && k < recording.keys->size(); ++k) {
    const BlockCache& block = recording.keys->block(k);
    const auto add = [&](const char* name, const at::Tensor& tensor) {
      if (tensor.defined()) tensors[fmt::format("{}.{}", name, k)] = tensor;
    };
    add("keys", block.keys());
    add("values", block.values());
    add("taps", block.recurrent.taps);
    add("states", block.recurrent.state);
  }
  return tensors;
}

/// What the blocks remember, of as many blocks as there are in the file; nullptr for none.
std::shared_ptr<KeyValueCache> recorded_blocks(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<BlockCache> blocks;
  const auto part = [&](const char* name) {
    const auto found = tensors.find(fmt::format("{}.{}", name, blocks.size()));
    return found == tensors.end() ? at::Tensor() : found->second;
  };
  while (true) {
    const at::Tensor keys = part("keys"), state = part("states");
    if (!keys.defined() && !state.defined()) break;
    BlockCache block(0);
    if (keys.defined()) block.replace(keys, part("values"));
    if (state.defined()) block.recurrent = {part("taps"), state, tensors.at("streams.0").size(1)};
    blocks.push_back(std::move(block));
  }
  return blocks.empty() ? nullptr : std::make_shared<KeyValueCache>(std::move(blocks));
}

/// The inverse of recorded_tensors.
std::shared_ptr<Recording> recording_of(const std::map<std::string, at::Tensor>& tensors) {
  auto recording = std::make_shared<Recording>();
  const auto list = [&](const char* name) {
    std::vector<at::Tensor> found;
    for (auto next = tensors.begin(); next != tensors.end();) {
      next = tensors.find(fmt::format("{}.{}", name, found.size()));
      if (next != tensors.end()) found.push_back(next->second);
    }
    return found;
  };
  recording->streams = list("streams");
  recording->vision.deepstack = list("deepstack");
  if (const auto merged = tensors.find("merged"); merged != tensors.end()) {
    recording->vision.merged = merged->second;
  }
  recording->keys = recorded_blocks(tensors);
  return recording;
}

/// The module tree as Python builds its own from: one entry a module, parents first.
py::list modules(const Model& model) {
  using namespace py::literals;
  const Tree& tree = model.tree();
  std::unordered_map<const Module*, int> index;
  py::list entries;
  for (const Module* module : tree.modules()) {
    py::list parameters;
    for (const Parameter& parameter : module->parameters()) parameters.append(parameter.name);
    const int parent = module->parent() ? index.at(module->parent()) : -1;
    index.emplace(module, static_cast<int>(index.size()));
    entries.append(py::dict(
        "name"_a = module->name(), "path"_a = module->path(), "site_path"_a = module->site_path(),
        "kind"_a = module->kind().name, "parent"_a = parent, "inputs"_a = tree.first_input(*module),
        "outputs"_a = tree.first_output(*module), "values"_a = tree.first_value(*module),
        "parameters"_a = parameters, "absent"_a = module->absent()));
  }
  return entries;
}

/// For each expert the matrices that it is stored as.
py::tuple by_expert(const Parameter& parameter) {
  const std::vector<at::Tensor>& parts = parameter.large->parts;
  const std::size_t each = parameter.expert_parts.size();
  py::tuple experts(parts.size() / each);
  for (std::size_t expert = 0; expert < experts.size(); ++expert) {
    const auto first = parts.begin() + static_cast<std::ptrdiff_t>(expert * each);
    experts[expert] = py::tuple(py::cast(std::vector(first, first + each)));
  }
  return experts;
}

/// A tensor; of a model that streams experts which are stored one by one, a tuple of tuples.
py::object parameter(const Model& model, int module, const std::string& name) {
  for (const Parameter& parameter : model.tree().modules().at(module)->parameters()) {
    if (parameter.name != name) continue;
    if (parameter.large && !parameter.large->parts.empty()) return by_expert(parameter);
    return py::cast(*parameter.tensor);
  }
  throw py::attribute_error(name);
}

at::Tensor apply(const Model& model, int module, const at::Tensor& x) {
  const auto* leaf = dynamic_cast<const Leaf*>(model.tree().modules().at(module));
  if (!leaf) {
    throw InputError(model.tree().modules().at(module)->site_path() +
                     " is no single operation; call the modules below it.");
  }
  const py::gil_scoped_release released;
  return leaf->apply(x);
}

/// Devices by the beginning of a weight's name, of which the longest counts.
using Placement = std::map<std::string, at::Device>;

at::Device device_of(const Placement& placement, const std::string& name) {
  std::size_t longest = 0;
  at::Device device = placement.at("");
  for (const auto& [prefix, place] : placement) {
    if (prefix.size() < longest || !name.starts_with(prefix)) continue;
    longest = prefix.size();
    device = place;
  }
  return device;
}

py::dict load(Model& model, const std::filesystem::path& folder, LoadOptions options,
              const Placement& placement) {
  using namespace py::literals;
  LoadReport report;
  {
    const py::gil_scoped_release released;
    options.device_of = [&](const std::string& name) { return device_of(placement, name); };
    report = model.load(Checkpoint::open(folder), options);
  }
  return py::dict("dtype"_a = dtype_text(report.dtype), "ignored"_a = report.ignored,
                  "unused"_a = report.unused, "converted"_a = report.converted,
                  "streamed"_a = report.streamed, "tied"_a = report.tied);
}

/// Order of a site's location; None where the site is unavailable.
std::optional<int> order_of(const Model& model, int site) {
  const Location* location = model.tree().sites().at(site).location;
  return location ? std::optional(location->order()) : std::nullopt;
}

py::list scan(const Model& model, Inputs inputs) {
  py::list values;
  for (const ScannedValue& value : model.scan(std::move(inputs))) {
    values.append(py::make_tuple(value.location->order(), value.slot, value.shape, value.dtype));
  }
  return values;
}

}  // namespace

void register_model(py::module_& module) {
  py::class_<Site>(module, "Site", "A named place to read or write.")
      .def_readonly("path", &Site::path)
      .def_readonly("slot", &Site::slot)
      .def_property_readonly("images_axis",
                             [](const Site& self) { return self.view == View::kImagesAxis; })
      .def_property_readonly("batch_axis",
                             [](const Site& self) { return self.view == View::kBatchAxis; })
      .def_readonly("read_only", &Site::read_only)
      .def_readonly("unavailable", &Site::unavailable)
      .def_readonly("list", &Site::list);

  py::class_<Inputs>(module, "Inputs", "The tensors of one forward.")
      .def(py::init(&make_inputs), py::arg("tensors"), py::arg("logits_to_keep") = 0)
      .def_readonly("input_ids", &Inputs::input_ids)
      .def(
          "replay",
          [](Inputs& self, std::shared_ptr<Recording> from) { self.replay.from = std::move(from); },
          py::arg("recording"))
      .def(
          "replay_tail",
          [](Inputs& self, std::shared_ptr<Recording> from, std::int64_t first,
             std::int64_t copies) {
            self.replay = {std::move(from), nullptr, Tail{first, copies}};
          },
          py::arg("recording"), py::arg("first"), py::arg("copies"));

  py::class_<Recording, std::shared_ptr<Recording>>(module, "Recording",
                                                    "What later traces of a prompt start from.")
      .def(py::init(&recording_of), py::arg("tensors"))
      .def("tensors", &recorded_tensors)
      .def_property_readonly("nbytes", &Recording::nbytes);

  module.def("following", &following, py::arg("inputs"), py::arg("tokens"),
             "The step of a generation after `inputs`.");

  module.def(
      "window_places",
      [](const std::array<std::int64_t, 3>& grid, std::int64_t merge, std::int64_t side) {
        return window_layout({{grid[0], grid[1], grid[2]}}, merge, side).places;
      },
      py::arg("grid"), py::arg("merge"), py::arg("side"),
      "The place of each image token of a grid in the order of the windows.");

  py::class_<LoadOptions>(module, "LoadOptions", "How weights are taken from a checkpoint.")
      .def(py::init([](std::optional<at::ScalarType> dtype, bool copy, bool stream) {
             LoadOptions options;
             options.dtype = dtype;
             options.copy = copy;
             options.stream = stream;
             return options;
           }),
           py::kw_only(), py::arg("dtype"), py::arg("copy"), py::arg("stream"));

  py::class_<Model, std::shared_ptr<Model>>(module, "Model", "A module tree and its weights.")
      .def_static("build", &build, py::arg("config_json"), py::arg("where"), py::arg("attention"),
                  py::arg("patch_embedding"), py::arg("text_only"), py::arg("dtype") = std::nullopt)
      .def("load", &load, py::arg("folder"), py::arg("options"), py::arg("placement"))
      .def("to", &Model::to, py::arg("device"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("loaded", &Model::loaded)
      .def_property_readonly("dtype", &Model::dtype)
      .def_property_readonly(
          "widening",
          [](const Model& self) {
            const WeightStream::Held held = self.widening();
            return std::make_pair(held.buffers, held.bytes);
          },
          "Of the buffers in which streamed weights are widened: their number, their bytes.")
      .def_property_readonly("device", [](const Model& self) { return self.device().str(); })
      .def("config", [](const Model& self) { return config_dict(self.config()); })
      .def("modules", &modules)
      .def("sites", [](const Model& self) { return self.tree().sites(); })
      .def("order_of", &order_of)
      .def("locations",
           [](const Model& self) {
             std::vector<std::string> paths;
             for (const Location* location : self.tree().order()) paths.push_back(location->path());
             return paths;
           })
      .def("parameter", &parameter)
      .def("apply", &apply)
      .def("count_weights",
           [](const Model& self) {
             const WeightCount count = count_weights(self.weights());
             return std::make_pair(count.tensors, count.parameters);
           })
      .def("trace",
           [](const std::shared_ptr<Model>& self, Inputs inputs) {
             return std::make_unique<RunningTrace>(self, self->trace(std::move(inputs)));
           })
      .def("record", &Model::record, py::arg("inputs"), py::arg("keys"),
           py::call_guard<py::gil_scoped_release>())
      .def("weight_version", &Model::weight_version)
      .def("generation_prompt", &Model::generation_prompt, py::arg("inputs"), py::arg("capacity"))
      .def(
          "forward", [](Model& self, Inputs inputs) { return self.forward(std::move(inputs)); },
          py::call_guard<py::gil_scoped_release>())
      .def("project_on_vocab", &Model::project_on_vocab, py::call_guard<py::gil_scoped_release>())
      .def("scan", &scan);
}

}  // namespace vlscope
