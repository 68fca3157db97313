"""LibTorch, Python's headers and pybind11, as the project's own Python has them installed."""

# Torch's include folder holds other people's headers as well, an incompatible fmt among them.
_TORCH_HEADERS = ["ATen", "c10", "torch"]

_BUILD = """
package(default_visibility = ["//visibility:public"])

# Headers of torch, for what needs no more than its names of dtypes.
cc_library(
    name = "torch_headers",
    hdrs = glob(
        ["torch_include/**/*.h"],
        exclude = [
            "torch_include/ATen/cudnn/**",
            "torch_include/ATen/hip/**",
            "torch_include/ATen/miopen/**",
            "torch_include/ATen/mps/**",
            "torch_include/ATen/xpu/**",
            "torch_include/torch/csrc/distributed/**",
            "torch_include/torch/csrc/inductor/**",
            "torch_include/torch/csrc/xpu/**",
        ],
    ),
    includes = ["torch_include", "torch_include/torch/csrc/api/include"],
    defines = {defines},
)

# And its two core libraries. `libtorch.so` would drag CUDA in.
cc_library(
    name = "torch",
    linkopts = ["-L{torch}/lib", "-ltorch_cpu", "-lc10"],
    deps = [":torch_headers"],
)

# What a program run outside Python needs besides: where the libraries lie on this machine.
cc_library(
    name = "torch_rpath",
    linkopts = ["-Wl,-rpath,{torch}/lib"],
)

cc_library(
    name = "pybind11",
    hdrs = glob(["python_include/**/*.h", "pybind11_include/**/*.h"]),
    includes = ["python_include", "pybind11_include"],
)

# Tensors across the border to Python.
cc_library(
    name = "torch_python",
    linkopts = ["-ltorch_python"],
    deps = [":pybind11", ":torch"],
)
"""

def _interpreter(ctx):
    named = ctx.os.environ.get("VLSCOPE_PYTHON")
    if named:
        return named
    venv = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("bin").get_child("python")
    if not venv.exists:
        fail("there is no .venv with torch; run ./dev build, or name a Python in VLSCOPE_PYTHON")
    return str(venv)

def _python_torch_impl(ctx):
    # Naming the pins makes this rule run again when they change.
    ctx.path(Label("//third_party/python:requirements.txt"))
    found = ctx.execute(
        [_interpreter(ctx), str(ctx.path(Label("//third_party:locate_torch.py")))],
        environment = {"PYTHONPATH": ctx.os.environ.get("VLSCOPE_PYTHONPATH", "")},
    )
    if found.return_code != 0:
        fail((found.stderr or found.stdout).strip())
    paths = json.decode(found.stdout)
    for folder in _TORCH_HEADERS:
        ctx.symlink(paths["torch"] + "/include/" + folder, "torch_include/" + folder)
    ctx.symlink(paths["pybind11"], "pybind11_include")
    ctx.symlink(paths["python"], "python_include")
    ctx.file("BUILD.bazel", _BUILD.format(defines = repr(paths["defines"]), torch = paths["torch"]))

python_torch = repository_rule(
    implementation = _python_torch_impl,
    environ = ["VLSCOPE_PYTHON", "VLSCOPE_PYTHONPATH"],
    local = True,
)
