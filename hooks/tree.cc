#include "hooks/tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_set>

namespace vlscope {
namespace {

Site value_site(const Module& module, const Value& value) {
  const std::string dot = module.site_path().empty() ? "" : ".";
  return {&module,
          module.find_location(value.location),
          value.slot,
          value.view,
          module.site_path() + dot + value.name,
          value.read_only,
          module.unavailable(value),
          value.needs,
          value.list};
}

}  // namespace

Tree::Tree(Module& root) {
  collect(root);
  for (const Module* module : modules_) {
    Range range;
    range.inputs = static_cast<int>(sites_.size());
    add_fields(*module, module->input, module->kind().inputs);
    range.outputs = static_cast<int>(sites_.size());
    add_fields(*module, module->output, module->kind().outputs);
    range.values = static_cast<int>(sites_.size());
    for (const Value& value : module->kind().values) sites_.push_back(value_site(*module, value));
    sites_of_.emplace(module, range);
  }
}

void Tree::collect(Module& module) {
  modules_.push_back(&module);
  for (Module* child : module.children()) collect(*child);
}

void Tree::add_fields(const Module& module, const Location& location,
                      const std::vector<Field>& fields) {
  int slot = 0;
  for (const Field& field : fields) {
    // A list has as many slots as the module's forward offers; its elements are reached by counting
    // on from its first site.
    const bool list = field.slots == Field::kList;
    for (int i = 0; i < (list ? 1 : field.slots); ++i) {
      const std::string read_only =
          field.read_only ? field.name + " was acted on before the module was called" : "";
      sites_.push_back({&module, &location, slot++, field.read_only ? View::kCopy : View::kWhole,
                        location.path() + (list ? "." + field.name : ""), read_only, "",
                        Needs::kNothing, list});
    }
  }
}

void Tree::number(const std::vector<const Location*>& visit_text,
                  const std::vector<const Location*>& visit_all) {
  const std::unordered_set<const Location*> on_text(visit_text.begin(), visit_text.end());
  for (const Location* visited : visit_all) {
    auto* location = const_cast<Location*>(visited);
    if (location->order_ != Location::kUnordered) {
      throw std::logic_error(fmt::format("the forward visits {} twice", location->path()));
    }
    location->order_ = static_cast<int>(order_.size());
    location->visual_ = on_text.count(visited) == 0;
    order_.push_back(visited);
  }
  const bool ascending =
      std::is_sorted(visit_text.begin(), visit_text.end(),
                     [](const Location* a, const Location* b) { return a->order() < b->order(); });
  if (!ascending || on_text.size() != visit_text.size()) {
    throw std::logic_error("the forward's order on text is not its order on an image");
  }
}

void Tree::forbid_visual(const std::string& reason) {
  for (Site& site : sites_) {
    if (!site.unavailable.empty()) continue;
    if (site.location->visual() || site.host->kind().name == kinds::vision.name) {
      site.unavailable = reason;
    }
  }
}

}  // namespace vlscope
