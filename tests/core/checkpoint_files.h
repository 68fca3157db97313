// Writes small safetensors files, well formed and otherwise, into a folder of one test's own.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace vlscope {

/// A folder that is removed with everything in it.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "vlscope-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  void write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
  }

  std::string read(const std::string& name) const {
    std::ifstream file(path_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path path_;
};

/// As if the file had last been written to so long ago.
inline void set_age(const std::filesystem::path& file, std::chrono::hours age) {
  std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - age);
}

/// The eight bytes of length, the header, and the data.
inline std::string safetensors_file(const std::string& header, const std::string& data = "") {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return file + header + data;
}

/// A tensor on its way into a file.
struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

template <typename Value>
std::string bytes_of(const std::vector<Value>& values) {
  std::string bytes(values.size() * sizeof(Value), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline FileTensor f32(const std::string& name, const std::vector<int64_t>& shape,
                      const std::vector<float>& values) {
  return {name, "F32", shape, bytes_of(values)};
}

/// A whole file of these tensors, its data starting at a multiple of eight plus `shift`.
inline std::string safetensors_file(const std::vector<FileTensor>& tensors, std::size_t shift = 0) {
  std::vector<std::string> entries;
  std::string data;
  for (const FileTensor& tensor : tensors) {
    entries.push_back(fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                  tensor.name, tensor.dtype, fmt::join(tensor.shape, ","),
                                  data.size(), data.size() + tensor.bytes.size()));
    data += tensor.bytes;
  }
  std::string header = fmt::format("{{{}}}", fmt::join(entries, ","));
  while (header.size() % 8 != shift) header += ' ';
  return safetensors_file(header, data);
}

/// The message of the `Expected` that `call` throws; a failure where it throws none.
template <typename Expected, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return "";
}

}  // namespace vlscope
