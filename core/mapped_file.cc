#include "core/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/errors.h"

namespace vlscope {
namespace {

/// Closes a file descriptor; a mapping lives on without it.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::filesystem::path& path, int error) {
  const std::string message =
      fmt::format("{}: {}", path.string(), std::generic_category().message(error));
  if (error == ENOENT || error == ENOTDIR) throw CheckpointNotFound(message);
  throw CheckpointError(message);
}

}  // namespace

std::shared_ptr<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) fail(path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError(fmt::format("{}: not a regular file", path.string()));
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* data = nullptr;
  if (size > 0) {
    // MAP_NORESERVE: a checkpoint larger than memory may be mapped; only edited pages are copied.
    data =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
    if (data == MAP_FAILED) fail(path, errno);
  }
  return std::shared_ptr<MappedFile>(new MappedFile(static_cast<std::byte*>(data), size));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
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
