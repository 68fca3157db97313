#include "core/mapped_file.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <functional>
#include <string>
#include <system_error>

#include "core/errors.h"

namespace vlscope {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;  // In nanoseconds.

[[noreturn]] void fail(const std::filesystem::path& path, int error) {
  const std::string message =
      fmt::format("{}: {}", path.string(), std::generic_category().message(error));
  if (error == ENOENT || error == ENOTDIR) throw CheckpointNotFound(message);
  throw CheckpointError(message);
}

/// "2026-01-31 12:00:00.250000000 UTC"; all digits, since two writes may be of one second.
std::string time_text(std::int64_t nanoseconds) {
  const std::int64_t part = ((nanoseconds % kSecond) + kSecond) % kSecond;
  const auto seconds = static_cast<std::time_t>((nanoseconds - part) / kSecond);
  return fmt::format("{:%Y-%m-%d %H:%M:%S}.{:09} UTC", fmt::gmtime(seconds), part);
}

}  // namespace

std::shared_ptr<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail(path, errno);
  std::shared_ptr<MappedFile> file(new MappedFile(path, descriptor));
  file->map();
  return file;
}

void MappedFile::map() {
  const struct stat now = status();
  if (!S_ISREG(now.st_mode)) {
    throw CheckpointError(fmt::format("{}: not a regular file", path_.string()));
  }
  opened_ = stamp_of(now);
  size_ = static_cast<std::size_t>(now.st_size);
  if (size_ == 0) return;
  // MAP_NORESERVE: a checkpoint larger than memory may be mapped; only edited pages are copied.
  void* data =
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (data == MAP_FAILED) fail(path_, errno);
  data_ = static_cast<std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
  ::close(descriptor_);
}

bool MappedFile::holds(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  return std::less_equal<>()(data_, byte) && std::less<>()(byte, data_ + size_);
}

struct stat MappedFile::status() const {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) fail(path_, errno);
  return status;
}

MappedFile::Stamp MappedFile::stamp_of(const struct stat& status) {
  return {status.st_size, status.st_mtim.tv_sec * kSecond + status.st_mtim.tv_nsec};
}

void MappedFile::require_unchanged() const {
  const Stamp now = stamp_of(status());
  if (now == opened_) return;
  throw CheckpointError(fmt::format(
      "{}: this file of weights is in use and was written to in place: {} bytes, of {}, "
      "when it was loaded; {} bytes, of {}, now. Load the model again; with copy=True, "
      "the weights are taken into memory, and the file may change.",
      path_.string(), opened_.size, time_text(opened_.modified), now.size,
      time_text(now.modified)));
}

const std::filesystem::path& require_folder(const std::filesystem::path& folder) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(folder, ignored);
  if (!std::filesystem::exists(status)) {
    throw CheckpointNotFound(fmt::format("{}: no such folder", folder.string()));
  }
  if (!std::filesystem::is_directory(status)) {
    throw CheckpointError(
        fmt::format("{}: not a folder; give the folder that holds config.json and the weights",
                    folder.string()));
  }
  return folder;
}

}  // namespace vlscope
