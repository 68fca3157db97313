#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/mapped_file.h"
#include "core/safetensors.h"

namespace vlscope {

/// The stored tensors of a checkpoint folder, mapped. Opening reads and checks every header and no
/// tensor; a tensor is made over the mapping, without a copy.
///
/// Immutable once open: any number of threads may use one.
class Checkpoint {
 public:
  /// Opens `folder`, which holds either one `model.safetensors` (it wins, as it does in
  /// transformers), or a `model.safetensors.index.json` with its shards (index and shards must
  /// agree both ways), or any number of `*.safetensors` (no name may appear twice).
  ///
  /// Raises CheckpointNotFound where the folder or any weight file is missing, naming for a shard
  /// how many tensors it should hold, and CheckpointError where anything is damaged.
  static Checkpoint open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }

  /// All stored names, by file and then in the order of their bytes.
  const std::vector<std::string>& names() const { return names_; }

  bool contains(const std::string& name) const { return stored_.count(name) != 0; }

  /// Raises CheckpointError where `name` is not stored; so do the two below.
  const TensorInfo& info(const std::string& name) const;

  /// The files that are mapped; they live as long as a tensor over them, or whoever holds them.
  const std::vector<std::shared_ptr<const MappedFile>>& files() const { return files_; }

  /// The file that holds `name`.
  const std::filesystem::path& file(const std::string& name) const;

  /// The tensor over its mapped bytes, contiguous, not requiring grad, keeping the mapping alive.
  /// Writing to it changes this process's pages, for every tensor made of the same name, and never
  /// the file. Bytes that are not aligned to the element size are copied instead.
  ///
  /// Raises CheckpointError, too, for a dtype that torch tensors are not made of here.
  at::Tensor tensor(const std::string& name) const;

 private:
  struct Shard {
    std::filesystem::path path;
    std::shared_ptr<MappedFile> mapping;
  };
  struct Stored {
    TensorInfo info;
    std::shared_ptr<const Shard> shard;
  };

  explicit Checkpoint(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void open_sharded(const std::filesystem::path& index);
  /// Maps one file and takes up its tensors; returns how many there were.
  std::size_t add_file(const std::filesystem::path& path);
  const Stored& find(const std::string& name) const;

  std::filesystem::path folder_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Stored> stored_;
};

}  // namespace vlscope
