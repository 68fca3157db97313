#include "core/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/errors.h"
#include "core/strict_json.h"

namespace vlscope {
namespace {

using nlohmann::json;

constexpr std::size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = kMaxJsonBytes;  // which is the cap of the safetensors library
constexpr std::size_t kMaxRank = 64;                 // the most dimensions a torch tensor may have

struct Dtype {
  std::string_view name;
  uint64_t bits;
  std::optional<c10::ScalarType> scalar_type = std::nullopt;
};

constexpr Dtype kDtypes[] = {
    {"F32", 32, c10::kFloat},
    {"BF16", 16, c10::kBFloat16},
    {"F16", 16, c10::kHalf},
    {"F64", 64, c10::kDouble},
    {"I64", 64, c10::kLong},
    {"I32", 32, c10::kInt},
    {"I16", 16, c10::kShort},
    {"I8", 8, c10::kChar},
    {"U8", 8, c10::kByte},
    {"BOOL", 8},
    {"U16", 16},
    {"U32", 32},
    {"U64", 64},
    {"C64", 64},
    {"F8_E4M3", 8},
    {"F8_E5M2", 8},
    {"F8_E8M0", 8},
    {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8},
    {"F6_E2M3", 6},
    {"F6_E3M2", 6},
    {"F4", 4},
};

/// One entry of the header on its way to a TensorInfo; fails with the file and the tensor's name.
class Entry {
 public:
  Entry(const std::string& name, const json& fields, const std::string& where)
      : name_(name), fields_(fields), where_(where) {
    if (!fields.is_object()) fail("its header entry is not an object");
  }

  /// `data_start` is where the tensors' bytes begin; `data_size` is how many there are.
  TensorInfo read(uint64_t data_start, uint64_t data_size) const {
    const Dtype& dtype = read_dtype();
    TensorInfo info{name_, std::string(dtype.name), dtype.scalar_type, read_shape(), 0, 0};
    const auto [begin, end] = read_offsets(data_size);
    const uint64_t needed = bytes(info.shape, dtype);
    if (end - begin != needed) {
      fail(fmt::format("{} with shape [{}] takes {} bytes, but data_offsets [{}, {}] span {}",
                       dtype.name, fmt::join(info.shape, ", "), needed, begin, end, end - begin));
    }
    info.begin = data_start + begin;
    info.end = data_start + end;
    return info;
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw CheckpointError(fmt::format("{}: tensor \"{}\": {}", where_, name_, reason));
  }

  const json& field(const char* key) const {
    const auto found = fields_.find(key);
    if (found == fields_.end()) fail(fmt::format("{} is missing from its header entry", key));
    return *found;
  }

  const Dtype& read_dtype() const {
    const json& value = field("dtype");
    if (!value.is_string()) fail("dtype is not a string");
    const auto& name = value.get_ref<const std::string&>();
    const auto* const found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                           [&](const Dtype& dtype) { return dtype.name == name; });
    if (found == std::end(kDtypes)) fail(fmt::format("unknown dtype \"{}\"", name));
    return *found;
  }

  std::vector<int64_t> read_shape() const {
    const json& value = field("shape");
    if (!value.is_array()) fail("shape is not a list");
    if (value.size() > kMaxRank) {
      fail(fmt::format("shape has {} dimensions, at most {} are possible", value.size(), kMaxRank));
    }
    std::vector<int64_t> shape;
    for (const json& size : value) shape.push_back(read_size(size, "shape"));
    return shape;
  }

  std::pair<uint64_t, uint64_t> read_offsets(uint64_t data_size) const {
    const json& value = field("data_offsets");
    if (!value.is_array() || value.size() != 2) fail("data_offsets is not a list of two numbers");
    const int64_t begin = read_size(value[0], "data_offsets");
    const int64_t end = read_size(value[1], "data_offsets");
    if (begin > end || static_cast<uint64_t>(end) > data_size) {
      fail(fmt::format("data_offsets [{}, {}] do not lie within the {} bytes of tensor data", begin,
                       end, data_size));
    }
    return {begin, end};
  }

  int64_t read_size(const json& value, std::string_view key) const {
    constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kLargest) {
      fail(fmt::format("{} holds something other than a whole number from 0 to {}", key, kLargest));
    }
    return value.get<int64_t>();
  }

  uint64_t bytes(const std::vector<int64_t>& shape, const Dtype& dtype) const {
    uint64_t bits = dtype.bits;
    int64_t stride = 1;  // that of a row, which a size of 0 elsewhere does not make small
    for (const int64_t size : shape) {
      if (__builtin_mul_overflow(bits, static_cast<uint64_t>(size), &bits) ||
          __builtin_mul_overflow(stride, std::max<int64_t>(size, 1), &stride)) {
        fail(fmt::format("shape [{}] is too large to count", fmt::join(shape, ", ")));
      }
    }
    if (bits % 8 != 0) {
      fail(fmt::format("shape [{}] of {} does not fill whole bytes", fmt::join(shape, ", "),
                       dtype.name));
    }
    return bits / 8;
  }

  const std::string& name_;
  const json& fields_;
  const std::string& where_;
};

/// The header's length in bytes, from the little-endian number that begins the file.
uint64_t header_length(std::string_view file, const std::string& where) {
  if (file.size() < kLengthBytes) {
    throw CheckpointError(
        fmt::format("{}: {} bytes are too few for a safetensors file, whose header length alone "
                    "takes {}",
                    where, file.size(), kLengthBytes));
  }
  uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | static_cast<unsigned char>(file[i]);
  }
  if (length > kMaxHeaderBytes) {
    throw CheckpointError(
        fmt::format("{}: a header of {} bytes is announced, at most {} are "
                    "possible; this is no safetensors file",
                    where, length, kMaxHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    throw CheckpointError(
        fmt::format("{}: a header of {} bytes is announced, but only {} follow; "
                    "the file is cut short",
                    where, length, file.size() - kLengthBytes));
  }
  return length;
}

json parse_header(std::string_view text, const std::string& where) {
  // The format wants the brace first, which also rules out a byte order mark.
  if (text.empty() || text.front() != '{') {
    throw CheckpointError(fmt::format("{}: the header does not begin with {{", where));
  }
  try {
    return parse_json_object(text);
  } catch (const JsonError& error) {
    throw CheckpointError(fmt::format("{}: damaged header: {}", where, error.what()));
  }
}

void check_metadata(const json& metadata, const std::string& where) {
  if (!metadata.is_object() || !std::all_of(metadata.begin(), metadata.end(),
                                            [](const json& value) { return value.is_string(); })) {
    throw CheckpointError(
        fmt::format("{}: __metadata__ is not an object of strings to strings", where));
  }
}

/// The spans, sorted, must follow each other from the first byte to the last.
void check_contiguous(const std::vector<TensorInfo>& tensors, uint64_t data_start,
                      uint64_t file_size, const std::string& where) {
  uint64_t expected = data_start;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin != expected) {
      throw CheckpointError(
          fmt::format("{}: tensor \"{}\" begins at byte {} of the data, but the one before it ends "
                      "at {}",
                      where, tensor.name, tensor.begin - data_start, expected - data_start));
    }
    expected = tensor.end;
  }
  if (expected != file_size) {
    throw CheckpointError(fmt::format("{}: the tensors end at byte {}, but the file has {} bytes",
                                      where, expected, file_size));
  }
}

/// Judges the name alone: the hub's cache keeps shards as links to files elsewhere.
void check_inside_folder(const std::string& file, const std::string& where) {
  const std::filesystem::path path(file);
  const bool climbs = std::find(path.begin(), path.end(), "..") != path.end();
  if (file.empty() || path.is_absolute() || climbs || file.find('\0') != std::string::npos) {
    throw CheckpointError(
        fmt::format("{}: \"{}\" is not the name of a file inside the folder", where, file));
  }
}

}  // namespace

std::vector<TensorInfo> parse_safetensors(std::string_view file, const std::string& where) {
  const uint64_t length = header_length(file, where);
  const uint64_t data_start = kLengthBytes + length;
  const json header = parse_header(file.substr(kLengthBytes, length), where);
  std::vector<TensorInfo> tensors;
  for (const auto& [name, fields] : header.items()) {
    if (name == "__metadata__") {
      check_metadata(fields, where);
    } else {
      tensors.push_back(Entry(name, fields, where).read(data_start, file.size() - data_start));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_contiguous(tensors, data_start, file.size(), where);
  return tensors;
}

std::map<std::string, std::vector<std::string>> parse_shard_index(std::string_view text,
                                                                  const std::string& where) {
  json index;
  try {
    index = parse_json_object(text);
  } catch (const JsonError& error) {
    throw CheckpointError(fmt::format("{}: {}", where, error.what()));
  }
  const json weight_map = index.value("weight_map", json());
  if (!weight_map.is_object() || weight_map.empty()) {
    throw CheckpointError(
        fmt::format("{}: weight_map is not an object of tensor names to file names", where));
  }
  std::map<std::string, std::vector<std::string>> shards;
  for (const auto& [name, file] : weight_map.items()) {
    if (!file.is_string()) {
      throw CheckpointError(
          fmt::format("{}: weight_map gives no file name for tensor \"{}\"", where, name));
    }
    check_inside_folder(file.get_ref<const std::string&>(), where);
    shards[file.get<std::string>()].push_back(name);
  }
  return shards;
}

}  // namespace vlscope
