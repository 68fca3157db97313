#include "core/checkpoint.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "core/errors.h"

namespace vlscope {
namespace {

namespace fs = std::filesystem;
using ShardIndex = std::map<std::string, std::vector<std::string>>;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// The `*.safetensors` files of a folder, sorted by name.
std::vector<fs::path> weight_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path());
  }
  if (error) throw CheckpointError(fmt::format("{}: {}", folder.string(), error.message()));
  std::sort(files.begin(), files.end());
  return files;
}

void require_shards(const fs::path& index, const ShardIndex& shards) {
  std::vector<std::string> missing;
  for (const auto& [file, tensors] : shards) {
    if (!is_there(index.parent_path() / file)) {
      missing.push_back(fmt::format("{} ({} tensors)", file, tensors.size()));
    }
  }
  if (missing.empty()) return;
  throw CheckpointNotFound(fmt::format("{}: {} of the {} files it names missing: {}",
                                       index.string(), missing.size(), shards.size(),
                                       fmt::join(missing, ", ")));
}

/// Throws for the first tensor that only one of the two sorted lists has.
void require_same_names(const fs::path& index, const fs::path& shard,
                        const std::vector<std::string>& listed,
                        const std::vector<std::string>& held) {
  const auto [in_index, in_shard] =
      std::mismatch(listed.begin(), listed.end(), held.begin(), held.end());
  if (in_index == listed.end() && in_shard == held.end()) return;
  const bool only_listed =
      in_shard == held.end() || (in_index != listed.end() && *in_index < *in_shard);
  const std::string counts = fmt::format("the index lists {} tensors for this file, which holds {}",
                                         listed.size(), held.size());
  if (only_listed) {
    throw CheckpointError(fmt::format("{}: tensor \"{}\" is listed in {} and not stored; {}",
                                      shard.string(), *in_index, index.string(), counts));
  }
  throw CheckpointError(fmt::format("{}: tensor \"{}\" is stored and not listed for it in {}; {}",
                                    shard.string(), *in_shard, index.string(), counts));
}

}  // namespace

Checkpoint Checkpoint::open(const fs::path& folder) {
  Checkpoint checkpoint(require_folder(folder));
  const fs::path single = folder / "model.safetensors";
  const fs::path index = folder / "model.safetensors.index.json";
  if (is_there(single)) {
    checkpoint.add_file(single);
  } else if (is_there(index)) {
    checkpoint.open_sharded(index);
  } else {
    for (const fs::path& file : weight_files(folder)) checkpoint.add_file(file);
  }
  if (checkpoint.names_.empty()) {
    throw CheckpointNotFound(
        fmt::format("{}: no weights; expected model.safetensors, model.safetensors.index.json or "
                    "*.safetensors (pickled .bin and .pt files are never read: convert them)",
                    folder.string()));
  }
  return checkpoint;
}

void Checkpoint::open_sharded(const fs::path& index) {
  const ShardIndex shards = parse_shard_index(MappedFile::open(index)->text(), index.string());
  require_shards(index, shards);
  for (const auto& [file, listed] : shards) {
    const fs::path shard = folder_ / file;
    const std::size_t count = add_file(shard);
    std::vector<std::string> held(names_.end() - static_cast<std::ptrdiff_t>(count), names_.end());
    std::sort(held.begin(), held.end());
    require_same_names(index, shard, listed, held);
  }
}

std::size_t Checkpoint::add_file(const fs::path& path) {
  const auto shard = std::make_shared<const Shard>(Shard{path, MappedFile::open(path)});
  std::vector<TensorInfo> tensors = parse_safetensors(shard->mapping->text(), path.string());
  files_.push_back(shard->mapping);
  for (TensorInfo& tensor : tensors) {
    std::string name = tensor.name;
    const auto [place, added] = stored_.try_emplace(name, Stored{std::move(tensor), shard});
    if (!added) {
      throw CheckpointError(fmt::format("{}: tensor \"{}\" is stored in {} as well", path.string(),
                                        name, place->second.shard->path.string()));
    }
    names_.push_back(std::move(name));
  }
  return tensors.size();
}

const Checkpoint::Stored& Checkpoint::find(const std::string& name) const {
  const auto found = stored_.find(name);
  if (found == stored_.end()) {
    throw CheckpointError(
        fmt::format("{}: no tensor \"{}\" is stored here", folder_.string(), name));
  }
  return found->second;
}

const TensorInfo& Checkpoint::info(const std::string& name) const { return find(name).info; }

const fs::path& Checkpoint::file(const std::string& name) const { return find(name).shard->path; }

at::Tensor Checkpoint::tensor(const std::string& name) const {
  const auto& [info, shard] = find(name);
  if (!info.scalar_type) {
    throw CheckpointError(fmt::format("{}: tensor \"{}\" is stored as {}, which cannot be read",
                                      shard->path.string(), name, info.dtype));
  }
  std::byte* const bytes = shard->mapping->data() + info.begin;
  const auto options = at::TensorOptions(*info.scalar_type);
  if (reinterpret_cast<std::uintptr_t>(bytes) % c10::elementSize(*info.scalar_type) != 0) {
    at::Tensor copy = at::empty(info.shape, options);
    if (info.end > info.begin) std::memcpy(copy.data_ptr(), bytes, info.end - info.begin);
    return copy;
  }
  return at::from_blob(bytes, info.shape, [mapping = shard->mapping](void*) {}, options);
}

}  // namespace vlscope
