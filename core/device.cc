#include "core/device.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace vlscope {

at::Tensor Uploader::operator()(const at::Tensor& source, at::ScalarType dtype) {
  at::Tensor place = at::empty(source.sizes(), at::TensorOptions(device_).dtype(dtype));
  (*this)(source, place);
  return place;
}

void Uploader::operator()(const at::Tensor& source, const at::Tensor& place) {
  if (source.numel() == 0) return;
  const std::int64_t count = source.dim() == 0 ? 1 : source.size(0);
  const std::int64_t row_bytes = place.numel() / count * place.element_size();
  const std::int64_t step = std::max<std::int64_t>(buffer_bytes_ / row_bytes, 1);
  if (step >= count) return send(source, place);
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t rows = std::min(step, count - begin);
    send(source.narrow(0, begin, rows), place.narrow(0, begin, rows));
  }
}

void Uploader::send(const at::Tensor& part, const at::Tensor& place) {
  const std::int64_t bytes = place.numel() * place.element_size();
  Buffer& buffer = free_buffer(bytes);
  const at::Tensor staged =
      buffer.bytes.narrow(0, 0, bytes).view(place.scalar_type()).view(place.sizes());
  staged.copy_(part);
  place.copy_(staged, /*non_blocking=*/true);
  if (!device_.is_cuda()) return;
  if (!buffer.sent) buffer.sent.emplace(device_.type());
  buffer.sent->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(place.device()));
}

Uploader::Buffer& Uploader::free_buffer(std::int64_t bytes) {
  Buffer& buffer = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  if (buffer.sent) buffer.sent->synchronize();
  if (!buffer.bytes.defined() || buffer.bytes.numel() < bytes) {
    const std::int64_t room = std::max(bytes, std::min(buffer_bytes_, 2 * bytes));
    buffer.bytes = at::empty({room}, at::dtype(at::kByte).pinned_memory(device_.is_cuda()));
  }
  return buffer;
}

}  // namespace vlscope
