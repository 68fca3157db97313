// The table of named values: what each kind of module serves, declared once. Dispatch, errors, the
// printout, the reference pages and the type stubs all come from here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vlscope {

/// How a value is made of the tensor that the forward holds.
enum class View : std::uint8_t {
  kWhole,       ///< The tensor itself.
  kImagesAxis,  ///< With a leading axis of 1: `[patches, h]` served as `[1, patches, h]`.
  kBatchAxis,   ///< Rows of every prompt: `[batch * seq, ...]` served as `[batch, seq, ...]`.
  kCopy,        ///< A copy: the forward keeps what it has (index lists that it already acted on).
};

/// What a prompt must hold for a value to be there, besides what its location needs.
enum class Needs : std::uint8_t { kNothing, kImage, kVideo };

/// One named value of a module.
struct Value {
  std::string name;         ///< "attention_queries"
  std::string layout;       ///< Name of the layout class: "Queries"
  std::string dims;         ///< Axes: "batch heads query head_dim"
  std::string description;  ///< One line for the reader.
  std::string location;     ///< Where in its host, or below: "output", "patch_embed.output", ...
  int slot = 0;             ///< Which of the tensors that the location offers.
  View view = View::kWhole;
  std::string read_only = {};    ///< Not empty: why it cannot be assigned, and what to assign.
  std::string unavailable = {};  ///< Not empty: why no model serves it.
  Needs needs = Needs::kNothing;
  /// As many tensors as the location offers from the slot on, such as one for each image. `layout`
  /// and `dims` are those of each.
  bool list = false;
};

/// One argument of a module's call, or one part of its result.
struct Field {
  std::string name;
  bool keyword = false;  ///< Passed by keyword (inputs only).
  int slots = 1;  ///< Tensors it is made of; more than one is a tuple, kList the rest as a list.
  bool read_only = false;
  static constexpr int kList = -1;
};

/// What a module's `.output` is: one tensor, a tuple, or a record with named fields.
enum class Form : std::uint8_t { kTensor, kTuple, kRecord };

/// Another name for a module below: `layers` for `model.language_model.layers`.
struct Alias {
  std::string name;
  std::string target;
};

/// A kind of module: its values and the shape of its call. Becomes a Python class of the same name.
struct Kind {
  std::string name;
  std::string doc;
  std::vector<Field> inputs;
  Form form = Form::kTensor;
  std::vector<Field> outputs;
  std::vector<Value> values = {};
  std::vector<Alias> aliases = {};
};

namespace kinds {
extern const Kind causal_lm, multimodal_model, text_model, text_layer, text_attention, text_mlp,
    gated_attention, delta_net, text_mixture, shared_expert, router, experts, text_rotary, vision,
    vision_layer, vision_attention, vision_mlp, vision_rotary, patch_embed, projector, merger,
    sequential, linear, conv3d, conv1d, embedding, rms_norm, zero_centered_rms_norm, gated_rms_norm,
    layer_norm, activation;
}  // namespace kinds

/// Every kind, in the order of the reference pages.
const std::vector<const Kind*>& all_kinds();

}  // namespace vlscope
