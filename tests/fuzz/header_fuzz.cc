// parse_safetensors on any bytes: a list of tensors that covers the file, or a CheckpointError.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/errors.h"
#include "core/safetensors.h"
#include "tests/fuzz/expect.h"

namespace vlscope {
namespace {

void parse(std::string_view file) {
  std::vector<TensorInfo> tensors;
  try {
    tensors = parse_safetensors(file, "fuzz");
  } catch (const CheckpointError&) {
    return;
  }
  if (tensors.empty()) return;
  std::uint64_t end = tensors.front().begin;
  for (const TensorInfo& tensor : tensors) {
    expect(tensor.begin == end && tensor.end >= tensor.begin, "the spans follow each other");
    end = tensor.end;
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape) {
      expect(size >= 0 && !__builtin_mul_overflow(elements, size, &elements),
             "the number of elements fits 64 bits");
    }
  }
  expect(end == file.size(), "the spans end with the file");
}

/// A header of its own, with its right length before it and as many bytes behind it as its first
/// one says: what a fuzzer would take long to guess together.
void parse_as_header(std::string_view header) {
  if (header.empty()) return;
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>((header.size() - 1) >> (8 * i) & 0xff);
  file += header.substr(1);
  file.append(static_cast<unsigned char>(header.front()), '\0');
  parse(file);
}

}  // namespace
}  // namespace vlscope

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  vlscope::parse(text);
  vlscope::parse_as_header(text);
  return 0;
}
