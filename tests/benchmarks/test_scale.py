"""The arithmetic of the predictions: the formulas' known totals, the counts of the configs, the page as printed."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
scale = sys.modules["scale"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scale)


def model(name):
    return scale.Model.read(scale.CONFIGS / f"{scale.MODELS[name]}.json")


def gigaflops(stages):
    return sum(stage.flops for stage in stages) / 1e9


@pytest.mark.parametrize(
    "name, seen, prompt, token",
    # An image of 448 x 448 and 40 tokens of text, worked out by hand from the shapes.
    [("2B", 575.87, 1254.45, 3.50), ("8B", 786.70, 4099.19, 15.28)],
)
def test_the_operations_are_counted_as_by_hand(name, seen, prompt, token):
    asked = scale.Prompt()
    assert gigaflops(model(name).see(asked)) == pytest.approx(seen, abs=0.01)
    assert gigaflops(model(name).prefill(asked)) == pytest.approx(prompt, abs=0.01)
    assert gigaflops(model(name).decode(asked)) == pytest.approx(token, abs=0.01)


@pytest.mark.parametrize("name", scale.MODELS)
def test_the_bytes_are_those_of_the_weights(name):
    vlscope = pytest.importorskip("vlscope")
    _, parameters = vlscope.weight_counts(scale.CONFIGS / f"{scale.MODELS[name]}.json")
    assert model(name).bytes == pytest.approx(2 * parameters, rel=2e-3)
    assert model(name).bytes < 2 * parameters  # norms, biases and the position table are left out


def test_every_expert_is_hit_once_tokens_are_many():
    assert scale.experts_hit(1, 128, 8) == pytest.approx(8)
    assert scale.experts_hit(10_000, 128, 8) == pytest.approx(128)
    assert scale.experts_hit(2, 128, 128) == 128


def test_a_forward_takes_the_longer_of_device_and_host():
    device = scale.Device(flops=10, bandwidth=10, efficiency=0.5, launch=1)
    stages = [scale.Stage("products", 100, 20, 3), scale.Stage("weights", 10, 50, 4)]
    forward = scale.Forward.of(stages, device)
    assert (forward.floor, forward.host) == (15, 7)
    assert forward.predicted(device) == 30
    assert scale.Forward(1, 7).predicted(device) == 7


def test_what_does_not_fit_one_device_needs_more():
    device = scale.Device()
    assert {name: scale.devices_needed(model(name), device) for name in scale.MODELS} == {
        "2B": 1,
        "8B": 1,
        "32B": 1,
        "30B-A3B": 1,
        "235B-A22B": 4,
    }


def test_the_page_has_the_tables_that_the_script_prints():
    page = scale.PAGE.read_text()
    assert scale.page_with(page, scale.section()) == page, "run ./dev python benchmarks/scale.py --write"
