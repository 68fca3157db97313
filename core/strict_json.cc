#include "core/strict_json.h"

#include <fmt/format.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

namespace vlscope {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDepth = 64;
constexpr std::size_t kMaxValues = 4'000'000;

/// Watches the parser's events for what the grammar allows and we do not.
class Guard {
 public:
  bool operator()(int, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        count_value();
        open();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        keys_.pop_back();
        break;
      case json::parse_event_t::key:
        add_key(parsed.get_ref<const std::string&>());
        break;
      case json::parse_event_t::value:
        count_value();
        break;
    }
    return true;
  }

 private:
  void open() {
    if (keys_.size() == kMaxDepth) {
      throw JsonError(fmt::format("it is nested deeper than {} levels", kMaxDepth));
    }
    keys_.emplace_back();
  }

  void add_key(const std::string& key) {
    if (!keys_.back().insert(key).second) {
      throw JsonError(fmt::format("the key \"{}\" appears twice in one object", key));
    }
  }

  void count_value() {
    if (++values_ > kMaxValues) {
      throw JsonError(fmt::format("it holds more than {} values", kMaxValues));
    }
  }

  std::vector<std::unordered_set<std::string>> keys_;  // of every object or array now open
  std::size_t values_ = 0;
};

/// nlohmann's message without its "[json.exception.parse_error.101] " tag.
std::string reason(const json::exception& error) {
  const std::string_view text = error.what();
  const std::size_t tag_end = text.find("] ");
  return std::string(tag_end == std::string_view::npos ? text : text.substr(tag_end + 2));
}

}  // namespace

json parse_json_object(std::string_view text) {
  if (text.size() > kMaxJsonBytes) {
    throw JsonError(
        fmt::format("it has {} bytes, at most {} are read", text.size(), kMaxJsonBytes));
  }
  try {
    Guard guard;
    json parsed = json::parse(text.begin(), text.end(), std::ref(guard));
    if (!parsed.is_object()) {
      throw JsonError(
          fmt::format("the top level is of type {}, not an object", parsed.type_name()));
    }
    return parsed;
  } catch (const json::exception& error) {
    throw JsonError(fmt::format("not valid JSON: {}", reason(error)));
  }
}

}  // namespace vlscope
