"""The CUDA compiler of this machine, where there is one that fits torch; else the CUDA library is left out."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "runtime",
    hdrs = glob(["include/*.h", "include/crt/*"]),
    includes = ["include"],
    linkopts = ["-L{lib}", "-lcudart"],
)
"""

_RULES = """
AVAILABLE = {available}

def cuda_objects(name, srcs, hdrs, opts = []):
    \"\"\"Compiles each .cu file; the objects link like those of any cc_library.\"\"\"
    if not AVAILABLE:
        return
    for src in srcs:
        native.genrule(
            name = name + "_" + src.replace(".", "_"),
            srcs = [src] + hdrs,
            outs = [src.replace(".cu", ".pic.o")],
            cmd = "{nvcc} -ccbin $(CC) -std=c++20 -O3 -I. -Xcompiler -fPIC {architectures} " +
                  " ".join(opts) + " -c $(execpath " + src + ") -o $@",
            toolchains = ["@bazel_tools//tools/cpp:current_cc_toolchain"],
        )
    native.filegroup(name = name, srcs = [name + "_" + src.replace(".", "_") for src in srcs])
"""

# Ampere and Hopper, and what the driver of a later device compiles for it.
_ARCHITECTURES = " ".join([
    "-gencode arch=compute_80,code=sm_80",
    "-gencode arch=compute_90,code=sm_90",
    "-gencode arch=compute_90,code=compute_90",
])

def _nvcc(ctx):
    """CUDA_HOME's, else the one on the PATH, else the one where its installer puts it."""
    home = ctx.os.environ.get("CUDA_HOME", "")
    found = None if home else ctx.which("nvcc")
    if found:
        return found.realpath
    nvcc = ctx.path((home or "/usr/local/cuda") + "/bin/nvcc")
    return nvcc.realpath if nvcc.exists else None

def _major(text, before):
    """The number that follows `before` in `text`, up to a point; None if it is not there."""
    parts = text.split(before)
    return parts[1].split(".")[0] if len(parts) > 1 else None

def _fits_torch(ctx, nvcc):
    """Whether torch is built for CUDA, and for the release that this compiler belongs to."""
    include = ctx.path(Label("@python_torch//:BUILD.bazel")).dirname.get_child("torch_include")
    torch = include.get_child("c10").realpath.dirname.dirname
    of_torch = _major(ctx.read(torch.get_child("version.py")), "cuda: Optional[str] = '")
    of_nvcc = _major(ctx.execute([nvcc, "--version"]).stdout, "release ")
    if of_torch and of_torch != of_nvcc:
        # buildifier: disable=print
        print("no CUDA kernels: %s is CUDA %s, torch is built for CUDA %s" % (nvcc, of_nvcc, of_torch))
    return of_torch == of_nvcc

def _local_cuda_impl(ctx):
    nvcc = _nvcc(ctx)
    if not nvcc or not _fits_torch(ctx, nvcc):
        ctx.file("BUILD.bazel", "")
        ctx.file("cuda.bzl", "AVAILABLE = False\n\ndef cuda_objects(name, srcs, hdrs, opts = []):\n    pass\n")
        return
    home = nvcc.dirname.dirname
    ctx.symlink(home.get_child("include"), "include")
    lib = home.get_child("lib64") if home.get_child("lib64").exists else home.get_child("lib")
    ctx.file("BUILD.bazel", _BUILD.format(lib = lib))
    ctx.file("cuda.bzl", _RULES.format(available = True, nvcc = nvcc, architectures = _ARCHITECTURES))

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
