// Ordinary tensors, whatever mode the caller is in.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace vlscope {

/// Ordinary tensors are promised everywhere, so inference mode never reaches the forward or what it
/// serves. Gradients stay off under it, as its user expects. Holds for the scope.
class OrdinaryMode {
 public:
  OrdinaryMode()
      : grad_(at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled()), mode_(false) {
    at::GradMode::set_enabled(grad_);
  }

 private:
  bool grad_;
  c10::InferenceMode mode_;
};

}  // namespace vlscope
