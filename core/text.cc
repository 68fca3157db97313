#include "core/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace vlscope {

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

std::string dtype_text(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

std::string tensor_text(const at::Tensor& tensor) {
  return fmt::format("{} {} on {}", shape_text(tensor), dtype_text(tensor.scalar_type()),
                     tensor.device().str());
}

}  // namespace vlscope
