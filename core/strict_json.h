#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string_view>

namespace vlscope {

/// The most that a text may be long.
constexpr std::size_t kMaxJsonBytes = 100'000'000;

/// The reason why a text was refused. It carries no file name: whoever read the file adds it.
struct JsonError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Parses one UTF-8 JSON object that came from a file nobody vouches for.
///
/// Refused beyond what JSON itself forbids: a duplicate key (readers disagree about which one
/// counts), a nesting deeper than 64, more than four million values, more than kMaxJsonBytes, and a
/// top level that is not an object. A leading byte order mark is skipped.
///
/// Raises JsonError.
nlohmann::json parse_json_object(std::string_view text);

}  // namespace vlscope
