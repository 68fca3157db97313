#include "core/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

namespace vlscope {

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

std::string dtype_text(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

std::string tensor_text(const at::Tensor& tensor) {
  std::string text = fmt::format("{} {} on {}", shape_text(tensor),
                                 dtype_text(tensor.scalar_type()), tensor.device().str());
  if (tensor.layout() == at::kStrided) return text;
  std::ostringstream layout;
  layout << tensor.layout();
  return fmt::format("{}, {}", text, layout.str());
}

}  // namespace vlscope
