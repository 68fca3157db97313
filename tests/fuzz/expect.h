// What a fuzz target says of a result: false ends the program, which the fuzzer reports with the
// input that led there.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace vlscope {

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

}  // namespace vlscope
