"""Prints, as JSON, where the running Python keeps what the C++ build needs.

Nothing is imported that takes long: torch and pybind11 are found, not loaded.
"""

import importlib.util
import json
import pathlib
import re
import sys
import sysconfig


def package_folder(name: str) -> pathlib.Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no package '{name}'; run ./dev build, which installs it")
    return pathlib.Path(spec.origin).parent


def python_include() -> pathlib.Path:
    include = pathlib.Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        sys.exit(f"no Python.h in {include}; install the headers of {sys.executable} (python3-dev)")
    return include


def torch_defines(torch: pathlib.Path) -> list[str]:
    """The ABI that torch was built with, as its own CMake file states it."""
    config = (torch / "share/cmake/Torch/TorchConfig.cmake").read_text()
    return re.findall(r"-D(_GLIBCXX_USE_CXX11_ABI=[01])", config)[:1]


def main() -> None:
    torch = package_folder("torch")
    print(
        json.dumps(
            {
                "torch": str(torch),
                "pybind11": str(package_folder("pybind11") / "include"),
                "python": str(python_include()),
                "defines": torch_defines(torch),
            }
        )
    )


main()
