"""The example that trains a sparse autoencoder."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sae.py"


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    out = tmp_path_factory.mktemp("sae")
    found = runpy.run_path(str(EXAMPLE))["run"](out, count=150, steps=600)
    assert (out / "features.png").stat().st_size > 10_000
    return found


def test_the_autoencoder_keeps_the_variance_and_the_answers_and_the_mean_state_does_not(figures):
    assert figures["unexplained"] < 0.1
    assert figures["same, reconstruction"] > 0.9 > 0.6 > figures["same, mean"]
    assert figures["right, reconstruction"] > 0.9 * figures["right"]
