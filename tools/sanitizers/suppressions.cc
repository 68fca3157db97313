// What sanitizers are not to report. They ask for it by these names; other builds never call them.

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name is the sanitizer's.
extern "C" const char* __tsan_default_suppressions() {
  // OpenMP's threads meet at barriers made of bare futexes, in a library that is not instrumented:
  // that one part of an at::parallel_for ends before the next begins is not seen. Torch's own
  // convolution clears its columns between two of them; its memset is seen, the barrier is not.
  return "race:libgomp\nrace:unfolded2d_copy\n";
}
