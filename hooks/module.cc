#include "hooks/module.h"

#include <utility>

namespace vlscope {
namespace {

std::string join(const std::string& head, const std::string& tail) {
  if (head.empty() || tail.empty()) return head + tail;
  return head + "." + tail;
}

/// The part of `path` behind `prefix`, if it starts with that whole path.
bool strip_prefix(const std::string& path, const std::string& prefix, std::string& rest) {
  if (path.compare(0, prefix.size(), prefix) != 0) return false;
  if (path.size() > prefix.size() && path[prefix.size()] != '.') return false;
  rest = path.size() > prefix.size() ? path.substr(prefix.size() + 1) : "";
  return true;
}

/// Path of `module` with the longest alias that any module above it (or it) offers put in place.
std::string shortest_path(const Module& module) {
  for (const Module* above = module.parent(); above; above = above->parent()) {
    const std::string tail =
        above->path().empty() ? module.path() : module.path().substr(above->path().size() + 1);
    std::string best, best_target;
    for (const Alias& alias : above->kind().aliases) {
      std::string rest;
      if (alias.target.size() > best_target.size() && strip_prefix(tail, alias.target, rest)) {
        best_target = alias.target;
        best = join(alias.name, rest);
      }
    }
    if (!best.empty()) return join(above->site_path(), best);
  }
  return module.path();
}

}  // namespace

Location::Location(Module* host, std::string name) : host_(host), name_(std::move(name)) {
  host->locations_.push_back(this);
}

std::string Location::path() const { return join(host_->site_path(), name_); }

Module::Module(Module* parent, std::string name, const Kind& kind)
    : parent_(parent), name_(std::move(name)), kind_(kind) {
  if (!parent) return;
  path_ = join(parent->path_, name_);
  parent->children_.push_back(this);
  site_path_ = shortest_path(*this);
}

const Location* Module::find_location(const std::string& path) const {
  for (const Location* location : locations_) {
    if (location->name() == path) return location;
  }
  for (const Module* child : children_) {
    std::string rest;
    if (strip_prefix(path, child->name_, rest)) return child->find_location(rest);
  }
  return nullptr;
}

std::string Module::unavailable(const Value& value) const {
  auto reason = unavailable_.find(value.name);
  return reason == unavailable_.end() ? value.unavailable : reason->second;
}

void Module::set_unavailable(const std::string& value, std::string reason) {
  unavailable_[value] = std::move(reason);
}

void Module::set_absent(const std::string& child, std::string reason) {
  absent_[child] = std::move(reason);
}

void Module::declare(std::string name, std::vector<std::int64_t> shape, at::Tensor& tensor) {
  parameters_.push_back({std::move(name), std::move(shape), &tensor});
}

void Module::declare(std::string name, std::vector<std::int64_t> shape, LargeWeight& weight,
                     std::vector<std::string> expert_parts) {
  parameters_.push_back(
      {std::move(name), std::move(shape), &weight.stored, &weight, std::move(expert_parts)});
}

}  // namespace vlscope
