#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/ops/launch.h"

namespace vlscope::programs {

/// Calls `run(T{})` for the type of an element on the device.
template <class F>
void with_type(Element element, F run) {
  switch (element) {
    case Element::kFloat:
      return run(float{});
    case Element::kBFloat16:
      return run(__nv_bfloat16{});
    case Element::kHalf:
      return run(__half{});
  }
}

}  // namespace vlscope::programs
