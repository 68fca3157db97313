"""Fuzz targets: libFuzzer programs, and the tests that replay what they have kept."""

def fuzz_target(name, deps, seeds = []):
    """Makes `<name>_fuzz` for --config=fuzz, and `<name>_corpus_test` for every other build.

    Args:
      name: `<name>_fuzz.cc` defines LLVMFuzzerTestOneInput; its inputs lie in `corpus/<name>`.
      deps: what that file uses.
      seeds: files of other folders that are inputs as well.
    """
    source = name + "_fuzz.cc"
    native.cc_binary(
        name = name + "_fuzz",
        testonly = True,
        srcs = [source, "expect.h"],
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = deps,
    )
    native.cc_test(
        name = name + "_corpus_test",
        size = "small",
        srcs = [source, "expect.h", "corpus_main.cc"],
        args = ["tests/fuzz/corpus/" + name] + ["$(locations %s)" % label for label in seeds],
        data = native.glob(["corpus/%s/*" % name]) + seeds,
        deps = deps,
    )
