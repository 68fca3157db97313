#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string_view>

namespace vlscope {

/// A regular file mapped into memory, private and writable: what is written to the mapping stays in
/// this process and never reaches the file. The mapping holds the file itself, not its name, so it
/// outlives a deletion, or a rename over the path. Truncating the file in place is not survivable
/// (the kernel answers with SIGBUS).
class MappedFile {
 public:
  /// Raises CheckpointNotFound where nothing is at `path`, CheckpointError where it cannot be read.
  /// No page of the file is read before it is touched; the kernel's readahead then follows the
  /// order of the forward.
  static std::shared_ptr<MappedFile> open(const std::filesystem::path& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  MappedFile(std::byte* data, std::size_t size) : data_(data), size_(size) {}

  std::byte* data_;
  std::size_t size_;
};

/// `folder` if it is one. Raises CheckpointNotFound where nothing is there, CheckpointError where
/// it is a file.
const std::filesystem::path& require_folder(const std::filesystem::path& folder);

}  // namespace vlscope
