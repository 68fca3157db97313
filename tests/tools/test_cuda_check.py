"""The check that waits for a device, gone through without one; and that it finds what is wrong."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vlscope")

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "cuda_check.py"


@pytest.fixture(scope="module")
def cuda_check():
    spec = importlib.util.spec_from_file_location("cuda_check", SCRIPT)
    module = sys.modules["cuda_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_passes_on_the_cpu_and_writes_what_it_found(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--reps", "1", "--scale", "32", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(out.read_text())
    assert all(check["met"] for check in found["checks"])
    names = {check["name"] for check in found["checks"]}
    assert {
        "a trace waits for nothing",
        "trace: logits",
        "trace: gradient",
        "generated tokens",
        "split: logits",
        "auto: logits",
    } <= names
    assert any("SwiGLU" in row["name"] for row in found["times"])


def with_wrong(cuda_check, monkeypatch, name, wrong):
    """The script's operators, of which one is another."""
    operators = SimpleNamespace(**{op: getattr(torch.ops.vlscope, op) for op in ("rms_norm", "rotate", "swiglu")})
    setattr(operators, name, wrong)
    monkeypatch.setattr(cuda_check, "OPS", operators)


def test_a_kernel_that_differs_in_its_last_bit_is_found(cuda_check, monkeypatch, capsys):
    def off_by_a_bit(gate, up):
        return torch.ops.vlscope.swiglu(gate, up) * (1 + torch.finfo(gate.dtype).eps)

    with_wrong(cuda_check, monkeypatch, "swiglu", off_by_a_bit)
    report = cuda_check.Report()
    cuda_check.check_bits(report, "cpu")
    assert report.failed == len(cuda_check.DTYPES)
    assert "DIFFERS  swiglu to the bit" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.1]), torch.ones(3)])
def test_a_result_that_is_wrong_is_found(cuda_check, wrong):
    report = cuda_check.Report()
    report.check("a result", cuda_check.difference(wrong, torch.tensor([1.0, 2.0])), 1e-3)
    assert report.failed == 1


def test_a_device_that_is_not_there_is_said_so():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert result.returncode == 2
    assert "there is no device" in result.stderr
