// What operations give, by shapes alone.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace vlscope::ops {

/// While one lives, operations of its thread on tensors of the "meta" device are answered by
/// torch's rules in C++. `import torch` puts others in their place, written in Python: slow, and
/// the first of them imports sympy and torch._dynamo, which takes seconds. Every other tensor, and
/// every operation without a rule here, goes the usual way.
class ShapeRules {
 public:
  ShapeRules();

 private:
  c10::impl::IncludeDispatchKeyGuard mode_;
};

}  // namespace vlscope::ops
