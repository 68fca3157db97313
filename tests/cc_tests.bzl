"""One GoogleTest program for each <name>_test.cc of a folder."""

def cc_tests(deps, data = []):
    for source in native.glob(["*_test.cc"]):
        native.cc_test(
            name = source[:-len(".cc")],
            size = "medium",
            srcs = [source] + native.glob(["*.h"]),
            data = data,
            deps = deps + [
                "//third_party:gtest",
                "//tools/sanitizers:suppressions",
                "@python_torch//:torch_rpath",
            ],
        )
