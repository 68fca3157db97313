// The tree of one model, numbered: every location in forward order, every site by path.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hooks/module.h"

namespace vlscope {

/// A named place to read or write: one tensor of one location, seen in one way.
struct Site {
  const Module* host;
  const Location* location;  ///< nullptr where `unavailable` says why.
  int slot;
  View view;
  std::string path;         ///< "layers.3.self_attn.attention_queries"
  std::string read_only;    ///< Not empty: why it is never assigned.
  std::string unavailable;  ///< Not empty: why it is never served.
  Needs needs = Needs::kNothing;
  bool list = false;  ///< The first of as many tensors as the location offers from here on.
};

/// Index of the modules, locations and sites below a root. Built once, after construction of the
/// modules; immutable after `number`.
class Tree {
 public:
  explicit Tree(Module& root);

  const Module& root() const { return *modules_.front(); }
  /// Every module, parents before children.
  const std::vector<Module*>& modules() const { return modules_; }
  /// Every site: for each module, those of its inputs, its outputs, then its named values.
  const std::vector<Site>& sites() const { return sites_; }
  /// Index of the first site of the named values of a module, in the order of its kind's table.
  int first_value(const Module& module) const { return sites_of_.at(&module).values; }
  /// Index of the first site of a module's input tensors; one site for each slot.
  int first_input(const Module& module) const { return sites_of_.at(&module).inputs; }
  int first_output(const Module& module) const { return sites_of_.at(&module).outputs; }

  /// Fixes the forward order. `visit_text` and `visit_all` are the locations that a forward without
  /// and with an image visits, each in its order; the second must contain the first.
  void number(const std::vector<const Location*>& visit_text,
              const std::vector<const Location*>& visit_all);
  /// Locations in forward order.
  const std::vector<const Location*>& order() const { return order_; }

  /// Makes every visual site unavailable, for a load without a processor.
  void forbid_visual(const std::string& reason);

 private:
  struct Range {
    int inputs, outputs, values;
  };
  void collect(Module& module);
  void add_fields(const Module& module, const Location& location, const std::vector<Field>& fields);

  std::vector<Module*> modules_;
  std::vector<Site> sites_;
  std::unordered_map<const Module*, Range> sites_of_;
  std::vector<const Location*> order_;
};

}  // namespace vlscope
