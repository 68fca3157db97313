// Tensors in words, for messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace vlscope {

/// "[1, 23, 64]"
std::string shape_text(const at::Tensor& tensor);

/// The name that torch gives a dtype in Python: "float32", "bfloat16", "int64".
std::string dtype_text(at::ScalarType dtype);

/// Shape, dtype and device: "[1, 23, 64] float32 on cpu".
std::string tensor_text(const at::Tensor& tensor);

}  // namespace vlscope
