// The module tree: the reference's modules under the reference's names, each with the locations
// where its forward can be watched.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "core/large_weight.h"
#include "hooks/values.h"

namespace vlscope {

class Module;

/// A point of the forward where live tensors can be seen and changed. Belongs to a module and lives
/// as long. The forward names it (`co_await trace.at(location, tensor)`), and so fixes its place in
/// the order.
class Location {
 public:
  Location(Module* host, std::string name);
  Location(const Location&) = delete;

  const std::string& name() const { return name_; }
  const Module& host() const { return *host_; }
  /// Place in the forward order, from 0; `kUnordered` until the model has been numbered.
  int order() const { return order_; }
  /// True if only a forward with an image or video gets here.
  bool visual() const { return visual_; }
  /// "layers.3.self_attn.output".
  std::string path() const;

  static constexpr int kUnordered = -1;

 private:
  friend class Tree;
  const Module* host_;
  std::string name_;
  int order_ = kUnordered;
  bool visual_ = false;
};

/// A parameter of a module: its name there ("weight"), the shape that the config gives it, and the
/// tensor that holds it. `large`: that tensor is one of these. `expert_parts`: see WeightSpec.
struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;
  at::Tensor* tensor;
  LargeWeight* large = nullptr;
  std::vector<std::string> expert_parts = {};
};

/// A node of the tree. Derived classes hold their children as members and are called as the
/// reference's modules are; they never change after loading, so traces may share them.
class Module {
 public:
  Module(Module* parent, std::string name, const Kind& kind);
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const Kind& kind() const { return kind_; }
  const Module* parent() const { return parent_; }
  /// Name below the parent, as in the reference: "self_attn", "layers.3".
  const std::string& name() const { return name_; }
  /// Native path from the root: "model.language_model.layers.3.self_attn"; the root's is "".
  const std::string& path() const { return path_; }
  /// Path by the short names: "layers.3.self_attn", "vision.layers.0.self_attn", "projector".
  const std::string& site_path() const { return site_path_; }

  const std::vector<Module*>& children() const { return children_; }
  const std::vector<Location*>& locations() const { return locations_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  /// What leaves the module when `x` enters: a tensor whose shape, dtype and device alone count.
  /// Those of `x`, unless the module says otherwise.
  virtual at::Tensor output_like(const at::Tensor& x) const { return x; }
  /// A location of this module ("output") or of one below it ("patch_embed.output"); nullptr if
  /// there is none.
  const Location* find_location(const std::string& path) const;
  /// Why this module does not serve the value; empty if it does.
  std::string unavailable(const Value& value) const;
  /// States why a value of this module's kind is not served here.
  void set_unavailable(const std::string& value, std::string reason);
  /// Modules that others of this kind have and this one has not, each with what it has instead.
  const std::map<std::string, std::string>& absent() const { return absent_; }
  void set_absent(const std::string& child, std::string reason);

 protected:
  /// Declares a parameter: the one place where its name and shape are written.
  void declare(std::string name, std::vector<std::int64_t> shape, at::Tensor& tensor);
  /// The same for a parameter that may stay as it is stored. One of `[experts, out, in]` may be
  /// stored in `expert_parts`.
  void declare(std::string name, std::vector<std::int64_t> shape, LargeWeight& weight,
               std::vector<std::string> expert_parts = {});

 private:
  friend class Location;
  Module* parent_;
  std::string name_;
  const Kind& kind_;
  std::string path_, site_path_;
  std::vector<Module*> children_;
  std::vector<Location*> locations_;
  std::vector<Parameter> parameters_;
  std::map<std::string, std::string> unavailable_, absent_;

 public:
  /// Entry and exit of a call: `.input`/`.inputs` and `.output` of every module.
  Location input{this, "input"};
  Location output{this, "output"};
};

}  // namespace vlscope
