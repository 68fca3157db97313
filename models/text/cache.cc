#include "models/text/cache.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/errors.h"
#include "core/ops/precision.h"

namespace vlscope {
namespace {

at::Tensor room_for(const at::Tensor& held, std::int64_t positions) {
  auto shape = held.sizes().vec();
  shape[2] = positions;
  at::Tensor room = at::empty(shape, held.options());
  room.narrow(2, 0, held.size(2)).copy_(held);
  return room;
}

}  // namespace

void check_follows(const std::string& block, const char* what, std::int64_t held,
                   std::int64_t past) {
  if (held == past) return;
  throw InputError(fmt::format(
      "{} holds the {} {} positions, but {} came before this step: it was skipped on an earlier "
      "step. Skip it on every step that follows, or on none.",
      block, what, held, past));
}

void BlockCache::replace(const at::Tensor& k, const at::Tensor& v) {
  keys_ = k;
  values_ = v;
  key_room_ = value_room_ = at::Tensor();
}

void BlockCache::replace(const BlockCache& other) {
  replace(other.keys_, other.values_);
  recurrent = other.recurrent;
  // A state is served as it is and may be edited; `other` goes on being used.
  if (recurrent.state.defined()) recurrent.state = recurrent.state.clone();
}

std::vector<at::Tensor> BlockCache::tensors() const {
  std::vector<at::Tensor> held;
  for (const at::Tensor& tensor : {keys_, values_, recurrent.taps, recurrent.state}) {
    if (tensor.defined()) held.push_back(tensor);
  }
  return held;
}

void BlockCache::append(const at::Tensor& k, const at::Tensor& v) {
  // A backward pass may want what was held before, so nothing is written beside it.
  if (ops::records_graph(keys_, k, values_, v)) {
    return replace(at::cat({keys_, k}, 2), at::cat({values_, v}, 2));
  }
  const std::int64_t before = length(), after = before + k.size(2);
  make_room(after);
  key_room_.narrow(2, before, k.size(2)).copy_(k);
  value_room_.narrow(2, before, v.size(2)).copy_(v);
  keys_ = key_room_.narrow(2, 0, after);
  values_ = value_room_.narrow(2, 0, after);
}

void BlockCache::make_room(std::int64_t positions) {
  if (key_room_.defined() && key_room_.size(2) >= positions) return;
  capacity_ = std::max(capacity_, positions + positions / 2);
  key_room_ = room_for(keys_, capacity_);
  value_room_ = room_for(values_, capacity_);
}

}  // namespace vlscope
