#pragma once

#include <string>

namespace vlscope {

/// The message of the error of type `E` that `work` throws.
template <class E, class Work>
std::string message_of(Work work) {
  try {
    work();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace vlscope
