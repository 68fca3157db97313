// parse_shard_index on any bytes: shards that lie inside the folder, or a CheckpointError.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "core/errors.h"
#include "core/safetensors.h"
#include "tests/fuzz/expect.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace vlscope;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const std::filesystem::path folder = "/models/one";
    for (const auto& [file, tensors] : parse_shard_index(text, "fuzz")) {
      const auto path = (folder / file).lexically_normal().native();
      expect(path.starts_with(folder.native() + "/"), "a shard lies inside the folder");
      expect(!tensors.empty() && std::is_sorted(tensors.begin(), tensors.end()),
             "a shard has tensors, sorted");
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
