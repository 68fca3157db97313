#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>

struct stat;  // of the system: the status of a file

namespace vlscope {

/// A regular file mapped into memory, private and writable: what is written to the mapping stays in
/// this process and never reaches the file. The mapping holds the file itself, not its name, so it
/// outlives a deletion, or a rename over the path.
///
/// A file that is written to in place does change the mapping, where its pages were not yet written
/// to here, and what was cut off cannot be read any more (the kernel answers with SIGBUS).
/// `require_unchanged` tells of what was written before it was called.
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
  /// Whether `address` lies in the mapping.
  bool holds(const void* address) const;

  /// Raises CheckpointError, giving both sizes and times, where the file was written to, cut short,
  /// extended or touched since it was opened: its size or its time of modification is another. To
  /// be deleted, renamed, linked or given other permissions changes neither. Reads nothing of the
  /// file; one call of the system, about half a microsecond.
  void require_unchanged() const;

 private:
  /// What writing to a file changes. The clock of its times ticks every few milliseconds: of two
  /// writes within a tick, the second does not show.
  struct Stamp {
    std::int64_t size = 0;
    std::int64_t modified = 0;  ///< Nanoseconds since 1970.
    bool operator==(const Stamp&) const = default;
  };

  /// Owns the descriptor.
  MappedFile(const std::filesystem::path& path, int descriptor)
      : path_(path), descriptor_(descriptor) {}
  void map();
  struct stat status() const;
  static Stamp stamp_of(const struct stat& status);

  std::filesystem::path path_;
  int descriptor_;  ///< Of the file that is mapped, whatever is at the path by now.
  Stamp opened_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// `folder` if it is one. Raises CheckpointNotFound where nothing is there, CheckpointError where
/// it is a file.
const std::filesystem::path& require_folder(const std::filesystem::path& folder);

}  // namespace vlscope
