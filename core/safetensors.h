#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace vlscope {

/// One tensor of a safetensors file, as its header describes it.
struct TensorInfo {
  std::string name;
  /// The format's own name, such as "BF16" or "F8_E4M3".
  std::string dtype;
  /// The torch dtype of its elements; none for those that are known by name only.
  std::optional<c10::ScalarType> scalar_type;
  std::vector<int64_t> shape;
  /// First byte and one past the last, counted from the start of the file.
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Reads the header of a safetensors file of which `file` is the whole content, and checks all that
/// the format demands (https://github.com/huggingface/safetensors, "Format"): eight bytes of
/// length, a JSON object of at most 100 MB without duplicate keys, `__metadata__` from strings to
/// strings, known dtypes, and byte spans that fit dtype and shape and together cover the rest of
/// the file without holes, overlaps or trailing bytes. Touches no byte of the tensors.
///
/// Returns the tensors in the order of their bytes. `where` begins every message.
/// Raises CheckpointError.
std::vector<TensorInfo> parse_safetensors(std::string_view file, const std::string& where);

/// Reads the text of a `model.safetensors.index.json`: for each shard, by file name, the tensors
/// that it must hold, sorted. A file name that would leave the folder is refused.
///
/// Raises CheckpointError.
std::map<std::string, std::vector<std::string>> parse_shard_index(std::string_view text,
                                                                  const std::string& where);

}  // namespace vlscope
