"""The library of CUDA kernels: built where nvcc is, for the devices it names, for every operator."""

import logging
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vlscope")
from vlscope import kernels  # noqa: E402

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
LIBRARY = kernels._LIBRARY

needs_nvcc = pytest.mark.skipif(
    NVCC is None or torch.version.cuda is None, reason="there is no nvcc, or torch is built without CUDA"
)
OPERATORS = [
    "segmented_attention",
    "segmented_attention_rows",
    "causal_attention",
    "causal_attention_rows",
    "rms_norm",
    "rotate",
    "swiglu",
]


def images(library):
    """Kind ("ptx" or "elf") and architecture of each image of device code: the headers that nvcc's fatbinary writes."""
    data, found = library.read_bytes(), set()
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), data):
        header_size, size = struct.unpack_from("<HQ", data, match.start() + 6)
        place, end = match.start() + header_size, match.start() + header_size + size
        while place < end:
            kind, _, entry_size, length = struct.unpack_from("<HHIQ", data, place)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            found.add(({1: "ptx", 2: "elf"}[kind], architecture))
            place += entry_size + length
    return found


@needs_nvcc
def test_the_kernels_are_built_for_ampere_for_hopper_and_for_what_comes_later():
    release = subprocess.run([NVCC, "--version"], capture_output=True, text=True).stdout
    if f"release {torch.version.cuda.split('.')[0]}." not in release:
        pytest.skip(f"nvcc is not of torch's release, {torch.version.cuda}")
    assert LIBRARY.exists(), "run ./dev build"
    assert images(LIBRARY) == {("elf", 80), ("elf", 90), ("ptx", 90)}


@pytest.mark.skipif(not LIBRARY.exists(), reason="built without nvcc")
def test_every_operator_has_a_kernel_on_cuda_once_the_library_is_loaded():
    script = f"""
import torch, vlscope
has = lambda name: torch._C._dispatch_has_kernel_for_dispatch_key(f"vlscope::{{name}}", "CUDA")
before = [has(name) for name in {OPERATORS}]
torch.ops.load_library({str(LIBRARY)!r})
print(all(has(name) for name in {OPERATORS}), any(before) == vlscope.cuda_kernels())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "True True\n", result.stderr


def test_no_other_operator_is_defined():
    defined = {
        schema.name.removeprefix("vlscope::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("vlscope::")
    }
    assert defined == set(OPERATORS)


def test_without_a_device_or_a_library_the_operators_are_composed(tmp_path):
    assert not kernels._load(tmp_path / "_cuda.so")
    assert kernels.cuda_kernels() == (LIBRARY.exists() and torch.cuda.is_available())


def test_a_library_that_does_not_load_is_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "_cuda.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING, "vlscope"):
        assert not kernels._load(broken)
    assert "torch's own operations are used" in caplog.text


def test_the_folder_of_the_library_is_the_package():
    assert Path(kernels.__file__).parent == LIBRARY.parent
