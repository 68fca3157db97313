# shellcheck shell=bash
# The tests under sanitizers, and the fuzzers. Sourced by ./dev from the repository root.

readonly DEBIAN_CLANG=(clang-14 clang-tidy-14 libclang-rt-14-dev)
readonly SANITIZERS=(asan-ubsan tsan)
readonly FUZZERS=(header index config grid)
readonly FUZZED=.fuzz # what the fuzzers found, between runs

# Runs one fuzzer for a number of seconds, on the inputs that the tree keeps and those of earlier runs.
fuzz_one() {
  local name=$1 seconds=$2 words=(-dict=tests/fuzz/keys.dict) seeds=("tests/fuzz/corpus/$1")
  [[ $name != grid ]] || words=() # its inputs are no text
  [[ $name != config ]] || seeds+=(tests/data/configs)
  say "fuzzing $name for $seconds seconds"
  mkdir -p "$FUZZED/$name"
  quietly "build/bin/tests/fuzz/${name}_fuzz" -max_total_time="$seconds" -max_len=8192 -timeout=20 \
    -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="$FUZZED/$name-" "${words[@]}" "$FUZZED/$name" "${seeds[@]}" ||
    fail "$name: the input that failed is the last $FUZZED/$name-* (above)"
}

# Runs every fuzzer for a number of seconds each.
fuzz() {
  local seconds=${1:-60} name
  set_up
  install_debian_packages "${DEBIAN_CLANG[@]}"
  bazel_quietly build --config=fuzz //tests/fuzz:fuzzers
  for name in "${FUZZERS[@]}"; do fuzz_one "$name" "$seconds"; done
}

# GoogleTest under each sanitizer, then a minute of each fuzzer.
sanitize() {
  local sanitizer
  set_up
  for sanitizer in "${SANITIZERS[@]}"; do
    say "running the C++ tests under $sanitizer (every file is compiled for it the first time)"
    bazel_quietly test --config="$sanitizer" //tests/...
  done
  fuzz 60
}
