"""The script that trains the built-in model: it runs, repeats itself, saves a folder that loads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

DEMO = Path(__file__).parents[2] / "demo"
STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A folder trained for a few steps, and what the script printed."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    command = [sys.executable, DEMO / "train.py", "--out", folder, "--steps", str(STEPS)]
    command += ["--seed", "0", "--log-every", "1", "--no-eval"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_same_seed_gives_the_same_first_losses(trained):
    lines = [line for line in trained[1].splitlines() if line.startswith("step")]
    losses = [float(line.split()[-1]) for line in lines]
    assert losses == pytest.approx([6.7747, 6.5929, 6.7035], abs=0.01)


def test_the_tokenizer_and_processor_files_are_those_of_the_shipped_model(trained):
    shipped = {path.name: path for path in (DEMO / "model").iterdir()}
    assert shipped.keys() == {path.name for path in trained[0].iterdir()}
    for name, path in shipped.items():
        if name != "model.safetensors":
            assert (trained[0] / name).read_bytes() == path.read_bytes(), name


def test_the_saved_folder_loads_and_answers(trained):
    folder, _ = trained
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    inputs = processor.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()
