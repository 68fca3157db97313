"""`device_map`: which part of a model goes where, planned without devices; and a forward that crosses their borders.

The "meta" device stands for a second one: what comes there has a shape and no numbers.
"""

import pytest
import torch

vlscope = pytest.importorskip("vlscope")
from vlscope.placement import Part, balanced, parts_of, placed  # noqa: E402

NAMES = ["vision", "embed_tokens", *(f"layers.{k}" for k in range(6)), "norm", "lm_head"]
CPU, META = torch.device("cpu"), torch.device("meta")
IDS = torch.arange(5, 12).unsqueeze(0)


def parts(*sizes):
    return [Part(name, name, size) for name, size in zip(NAMES, sizes, strict=True)]


@pytest.fixture(scope="module")
def demo():
    return vlscope.load("demo", dispatch=False)


def test_the_parts_of_a_model_hold_all_its_bytes(demo):
    found = parts_of(demo._core, torch.float32)
    assert [part.name for part in found] == NAMES[:-1]  # The head is tied.
    _, parameters = vlscope.weight_counts(demo.folder / "config.json")
    assert sum(part.nbytes for part in found) == 4 * parameters
    assert sum(part.nbytes for part in parts_of(demo._core, torch.bfloat16)) == 2 * parameters


def test_blocks_are_divided_in_order_and_evenly():
    plan = balanced(parts(4, 4, *[4] * 6, 0, 8), {"cuda:0": 100, "cuda:1": 100})
    assert list(plan) == NAMES
    assert list(plan.values()) == ["cuda:0"] * 5 + ["cuda:1"] * 5


def test_a_device_with_more_room_takes_more():
    plan = balanced(parts(4, 4, *[4] * 6, 0, 8), {"cuda:0": 100, "cuda:1": 25})
    assert list(plan.values()) == ["cuda:0"] * 9 + ["cuda:1"]  # 32 of 100, and 8 of 25


def test_the_tower_and_the_embedding_stay_together():
    plan = balanced(parts(10, 10, *[1] * 6, 1, 1), {"cuda:0": 15, "cuda:1": 40})
    assert plan["vision"] == plan["embed_tokens"] == "cuda:1"


def test_what_fits_nowhere_goes_to_the_cpu():
    plan = balanced(parts(4, 4, *[4] * 6, 0, 8), {"cuda:0": 17, "cuda:1": 9})
    assert list(plan.values()) == ["cuda:0"] * 4 + ["cuda:1"] * 2 + ["cpu"] * 4
    assert set(balanced(parts(*[1] * 10), {}).values()) == {"cpu"}


def test_no_device_is_filled_further_than_needed():
    sizes = torch.randint(1, 50, (20, 10), generator=torch.Generator().manual_seed(0)).tolist()
    for of_parts in sizes:
        room = {"cuda:0": 300.0, "cuda:1": 200.0, "cuda:2": 400.0}
        plan = balanced(parts(*of_parts), room)
        held = {name: sum(part.nbytes for part in parts(*of_parts) if plan[part.name] == name) for name in room}
        assert sum(held.values()) == sum(of_parts)
        share = max(held[name] / room[name] for name in room)
        smaller = balanced(parts(*of_parts), {name: 0.99 * share * size for name, size in room.items()})
        assert "cpu" in smaller.values()


def test_a_mapping_names_parts_or_blocks_and_the_later_key_counts(demo):
    plan = placed(parts_of(demo._core, None), {"layers.*": "meta", "layers.0:2": "cpu", "layers.5": "cpu", "": "cpu"})
    assert [name for name, device in plan.items() if device == META] == ["layers.2", "layers.3", "layers.4"]


@pytest.mark.parametrize(
    "device_map, message",
    [
        ({"": "cpu", "layers.6": "cpu"}, r"'layers.6', which is no part.*norm, layers.0 to layers.5"),
        ({"": "cpu", "lm_head": "cpu"}, "tied to embed_tokens"),
        ({"layers.*": "cpu"}, "no device for vision, embed_tokens, norm: name them"),
        ({"": "cpu", "vision": "meta"}, "vision on meta and embed_tokens on cpu"),
        ({"": "tpu"}, "tpu"),
        ("everywhere", "everywhere"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused_before_anything_is_loaded(device_map, message):
    with pytest.raises(vlscope.InputError, match=message):
        vlscope.load("demo", device_map=device_map)


def test_one_of_device_and_device_map_is_given():
    with pytest.raises(vlscope.InputError, match="give one of the two"):
        vlscope.load("demo", device="cpu", device_map="auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices")
def test_without_devices_auto_is_the_cpu():
    model = vlscope.load("demo", device_map="auto")
    assert set(model.device_map.values()) == {CPU}
    assert torch.equal(model(input_ids=IDS).logits, vlscope.load("demo")(input_ids=IDS).logits)


def test_the_stream_follows_the_blocks_and_values_come_from_where_they_live():
    picture = torch.zeros(3, 64, 64, dtype=torch.uint8)
    model = vlscope.load("demo", device_map={"": "cpu", "layers.2:": "meta", "norm": "meta"})
    whole = vlscope.load("demo")
    with model.trace("What is this?", images=[picture]), whole.trace("What is this?", images=[picture]) as reference:
        features = model.vision.image_features.save()
        here = [model.layers[k].layer_output.save() for k in range(2)]
        pattern = model.layers[2].self_attn.attention_probabilities
        there = [model.layers[k].layer_output.save() for k in range(2, 6)]
        there.append(model.norm.output.save())
        expected = [reference.layers[k].layer_output.save() for k in range(6)]
        expected.append(reference.norm.output.save())
    assert features.device == CPU
    assert all(torch.equal(value, other) for value, other in zip(here, expected))
    assert {value.device for value in (pattern, *there)} == {META}
    assert [value.shape for value in there] == [value.shape for value in expected[2:]]
    assert model.layers[1].mlp.up_proj.weight.device == CPU
    assert model.layers[2].mlp.up_proj.weight.device == META


def test_a_model_moves_with_its_weights_and_its_tie():
    model = vlscope.load("demo")
    expected = model(input_ids=IDS).logits
    weight = model.embed_tokens.weight
    assert torch.equal(model.to("cpu")(input_ids=IDS).logits, expected)
    assert model.embed_tokens.weight.data_ptr() == weight.data_ptr()
    assert (model.lm_head.weight.data_ptr() == weight.data_ptr()) == model.config["tie_word_embeddings"]
    with pytest.raises(vlscope.InputError, match='"cpu" and "cuda"'):
        model.to("meta")
