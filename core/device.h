// From the host to a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <optional>

namespace vlscope {

/// `x`, a tensor of the host, on `device`: without waiting for the device, whose later work waits
/// for the copy. CUDA has read ordinary memory when this returns; it would go on reading what is
/// page-locked, and its owner may write there.
inline at::Tensor on_device(const at::Tensor& x, at::Device device) {
  const bool waits = !device.is_cuda() || (x.is_cpu() && x.is_pinned());
  return x.to(device, x.scalar_type(), /*non_blocking=*/!waits);
}

/// `x` on another device, or itself. Later work on either waits for the copy as it must; nothing
/// else does.
inline at::Tensor moved(const at::Tensor& x, at::Device device) {
  if (!x.defined() || x.device() == device) return x;
  return x.is_cpu() ? on_device(x, device)
                    : x.to(device, x.scalar_type(), /*non_blocking=*/device.is_cuda());
}

/// Copies tensors of the host to a device one after the other, each byte once. They go through two
/// buffers, page-locked where the device is CUDA: while one is on its way, the other is filled.
/// Nothing waits for the last copies but the device's own later work.
class Uploader {
 public:
  explicit Uploader(at::Device device, std::int64_t buffer_bytes = std::int64_t{64} << 20)
      : device_(device), buffer_bytes_(buffer_bytes) {}

  /// A tensor on the device with the numbers of `source`, converted on the way.
  at::Tensor operator()(const at::Tensor& source, at::ScalarType dtype);
  /// Writes `source` to `place`, a tensor on the device of the same shape.
  void operator()(const at::Tensor& source, const at::Tensor& place);

 private:
  struct Buffer {
    at::Tensor bytes;
    std::optional<c10::Event> sent;  ///< When what it held has arrived; none on the CPU.
  };
  void send(const at::Tensor& part, const at::Tensor& place);
  /// The next buffer, empty again, with room for so many bytes.
  Buffer& free_buffer(std::int64_t bytes);

  at::Device device_;
  std::int64_t buffer_bytes_;
  std::array<Buffer, 2> buffers_;
  std::size_t next_ = 0;
};

}  // namespace vlscope
