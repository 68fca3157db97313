"""Which rows a collection keeps, and that they are what plain traces of each prompt alone have."""

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tiny
import vlscope
from vlscope.collection import forward, rows

from . import samples
from .samples import mixed, plain, stored

collect = functools.partial(vlscope.collect, progress=False)


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


SITE = "layers.3.layer_output"
WINDOWS, MIXTURE = next(iter(tiny.QWEN2_5_VL)), next(iter(tiny.QWEN3_VL_MOE))


def test_all_rows_of_a_token_value_are_the_plain_traces_row_by_row_without_padding(model, tmp_path):
    collect(model, mixed(), SITE, tmp_path)
    values = [value[0] for value in plain(model, mixed(), [SITE])[SITE]]
    found = stored(tmp_path)
    assert torch.equal(found[SITE], torch.cat(values))
    lengths = [len(value) for value in values]
    assert found["sample"].tolist() == [k for k, length in enumerate(lengths) for _ in range(length)]
    assert found["position"].tolist() == [p for length in lengths for p in range(length)]
    ids = torch.cat([ids[0] for ids in plain(model, mixed(), ["input_ids"])["input_ids"]])
    assert torch.equal(found["token_id"], ids)


def test_images_and_places_of_a_row_are_those_of_the_index_maps(model, tmp_path):
    collect(model, mixed(), SITE, tmp_path)
    found = stored(tmp_path)
    two = mixed()[2]
    image = found["image"][found["sample"] == 2]
    row, column = (found[name][found["sample"] == 2] for name in ("grid_row", "grid_col"))
    for number, tokens in enumerate(model.image_tokens(**two)):
        own = image == number
        assert own.nonzero().flatten().tolist() == tokens.positions.tolist()
        assert tokens.token_at(row[own], column[own]).tolist() == list(range(len(tokens)))
    outside = image == -1
    assert outside.any() and (row[outside] == -1).all() and (column[outside] == -1).all()


@pytest.mark.parametrize("batch_size", [2, 3, 7])
def test_batches_and_padding_change_no_row_that_is_stored(model, tmp_path, batch_size):
    sites = [SITE, "layers.0.deepstack_output", "vision.layers.1.layer_output", "vision.image_features"]
    collect(model, mixed(), sites, tmp_path / "one")
    collect(model, mixed(), sites, tmp_path / "many", batch_size=batch_size)
    for site in sites:
        one, many = stored(tmp_path / "one", site), stored(tmp_path / "many", site)
        for name in rows.COLUMNS:
            assert torch.equal(one[name], many[name]), (site, name)
        torch.testing.assert_close(many[site], one[site], rtol=1e-4, atol=1e-4)


def test_rows_of_the_vision_tower_are_patches_with_their_places_in_the_grid(model, tmp_path):
    sites = ["vision.patch_embeddings", "vision.layers.1.layer_output", "vision.layers.2.self_attn.attention_queries"]
    collect(model, mixed(), sites, tmp_path)
    pictured = [sample for sample in mixed() if not isinstance(sample, str)]
    values = plain(model, pictured, sites)
    found = stored(tmp_path)
    for site in sites[:2]:
        assert torch.equal(found[site], torch.cat([value[0] for value in values[site]]))
    heads = torch.cat([value[0].transpose(0, 1) for value in values[sites[2]]])
    assert torch.equal(found[sites[2]], heads)
    assert (found["token_id"] == -1).all()
    own = found["sample"] == 2
    first, second = model.image_tokens(**mixed()[2])
    assert found["image"][own].tolist() == [0] * 16 + [1] * 24
    for image, number in ((first, 0), (second, 1)):
        here = own & (found["image"] == number)
        at = image.patch_at(found["grid_row"][here], found["grid_col"][here])
        assert at.tolist() == found["position"][here].tolist()


def test_a_video_is_numbered_after_the_images_and_its_rows_are_those_of_the_plain_trace(model, tmp_path):
    frames = [samples.picture(color, size=(64, 64)) for color in ("red", "blue", "red", "blue")]
    clip = {"prompt": "What is this?", "videos": [frames], "images": [samples.picture("green", size=(96, 64))]}
    data = ["Hello", clip, samples.image_prompt(0)]
    sites = [SITE, "vision.layers.1.layer_output", "vision.video_features", "layers.0.deepstack_output"]
    collect(model, data, sites, tmp_path / "one")
    collect(model, data, sites, tmp_path / "batch", batch_size=3)
    for site in sites:
        found, batch = stored(tmp_path / "one", site), stored(tmp_path / "batch", site)
        for name in rows.COLUMNS:
            assert torch.equal(found[name], batch[name]), (site, name)
        own = found["sample"] == 1
        value = plain(model, [clip], [site])[site][0]
        assert torch.equal(found[site][own], value[0] if value.ndim == 3 else value)
        torch.testing.assert_close(batch[site], found[site], rtol=1e-4, atol=1e-4)
    found = stored(tmp_path / "one", SITE)
    own = found["sample"] == 1
    (video,) = model.video_tokens(**clip)
    assert found["position"][own & (found["image"] == 1)].tolist() == video.positions.tolist()
    assert set(stored(tmp_path / "one", "vision.video_features")["image"].tolist()) == {1}


def test_image_features_and_deepstack_rows_stand_at_their_tokens(model, tmp_path):
    sites = ["vision.image_features", "layers.0.deepstack_output"]
    collect(model, mixed(), sites, tmp_path)
    pictured = [sample for sample in mixed() if not isinstance(sample, str)]
    found = stored(tmp_path)
    for site, values in plain(model, pictured, sites).items():
        assert torch.equal(found[site], torch.cat(values))
    assert (found["token_id"] == model.config["image_token_id"]).all()


@pytest.mark.parametrize("name", ["qwen2_5_windows", "hybrid", "moe"])
def test_other_families_give_the_rows_of_their_plain_traces(vlscope_model, tmp_path, name):
    model = vlscope_model({"qwen2_5_windows": WINDOWS, "hybrid": "hybrid", "moe": MIXTURE}[name])
    sites = ["layers.1.layer_output", "vision.patch_embeddings", "vision.layers.0.layer_output"]
    data = [samples.image_prompt(2), "Hello", samples.image_prompt(1)]
    collect(model, data, sites, tmp_path, batch_size=1)
    for site in sites:
        found = stored(tmp_path, site)
        values = plain(model, data if site.startswith("layers") else [data[0], data[2]], [site])[site]
        assert torch.equal(found[site], torch.cat([value[0] for value in values]))
    (image,) = model.image_tokens(**data[0])
    found = stored(tmp_path, "vision.layers.0.layer_output")
    first = found["sample"] == 0
    at = image.patch_at(found["grid_row"][first], found["grid_col"][first])
    assert at.tolist() == list(range(int(first.sum())))
    found = stored(tmp_path, "vision.patch_embeddings")
    block, inside = torch.arange(int(first.sum())) // 4, torch.arange(int(first.sum())) % 4
    _, row, column = image.place(block)
    assert torch.equal(found["grid_row"][first], 2 * row + inside // 2)
    assert torch.equal(found["grid_col"][first], 2 * column + inside % 2)


def test_a_choice_of_rows_is_a_part_of_all_rows(model, tmp_path):
    collect(model, mixed(), SITE, tmp_path / "all")
    everything = stored(tmp_path / "all")
    last = torch.tensor([*(everything["position"].diff() < 0).tolist(), True])
    chosen = {
        "image": everything["image"] >= 0,
        "text": everything["image"] < 0,
        "last": last,
    }
    corner = (everything["grid_row"] == 0) & (everything["grid_col"] == 0)
    functions = {
        "corner": (lambda index: (index.grid_row == 0) & (index.grid_col == 0), corner),
        "first two": (lambda index: [0, 1], everything["position"] < 2),
        "none": (lambda index: [], everything["position"] < 0),
    }
    for name, (function, kept) in functions.items():
        chosen[name] = kept
        collect(model, mixed(), SITE, tmp_path / name, rows=function, batch_size=3)
    for name in ("image", "text", "last"):
        collect(model, mixed(), SITE, tmp_path / name, rows=name, batch_size=1)
    for name, kept in chosen.items():
        found = stored(tmp_path / name)
        assert torch.equal(found["sample"], everything["sample"][kept]), name
        assert torch.equal(found["position"], everything["position"][kept]), name
        if name != "none":
            torch.testing.assert_close(found[SITE], everything[SITE][kept], rtol=1e-4, atol=1e-4)


def test_cs_04_the_last_token_of_a_batch_padded_on_the_right_is_its_last_real_one(model):
    ids = torch.tensor([[5, 6, 7, 8, 0, 0, 0, 0, 0], [9, 10, 11, 12, 13, 14, 15, 16, 17]])
    mask = torch.tensor([[1] * 4 + [0] * 5, [1] * 9])
    sites = rows.resolve(model, SITE)
    batch = {"input_ids": ids, "attention_mask": mask}
    index, found = forward.run(model, batch, [0, 1], sites, "last")[SITE]
    assert index.position.tolist() == [3, 8] and index.token_id.tolist() == [8, 17]
    for row, single in zip(found, (ids[:1, :4], ids[1:]), strict=True):
        with torch.no_grad(), model.trace(single):
            torch.testing.assert_close(row, model.layers[3].layer_output[0, -1], rtol=1e-4, atol=1e-4)


def test_cs_04_an_encoding_with_padding_is_stored_without_it(model, tmp_path):
    padded = {"input_ids": torch.tensor([[5, 6, 7, 8, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
    collect(model, [padded, [5, 6, 7, 8]], SITE, tmp_path)
    found = stored(tmp_path)
    assert found["position"].tolist() == [0, 1, 2, 3] * 2
    assert torch.equal(found[SITE][:4], found[SITE][4:])


def test_cs_01_bfloat16_rows_are_stored_as_such_and_come_back_to_the_bit(model, tmp_path):
    collect(model, mixed(), SITE, tmp_path, dtype="bfloat16")
    values = plain(model, mixed(), [SITE], torch.bfloat16)[SITE]
    column = vlscope.ActivationDataset(tmp_path)[SITE]
    assert column.dtype == torch.bfloat16
    assert torch.equal(column[:], torch.cat([value[0] for value in values]))
    with pytest.raises(TypeError, match="BFloat16"):
        column[:].numpy()


def test_cs_02_transposed_aliased_and_integer_values_are_stored_as_they_are(model, tmp_path, vlscope_model):
    sites = ["layers.0.self_attn.attention_keys", "layers.0.layer_output", "layers.0.output", "attention_mask"]
    collect(model, mixed(), sites, tmp_path / "demo", dtype=torch.float16)
    values = plain(model, mixed(), sites)
    found = stored(tmp_path / "demo")
    keys = torch.cat([value[0].transpose(0, 1) for value in values[sites[0]]])
    assert torch.equal(found[sites[0]], keys.half())
    assert torch.equal(found["layers.0.layer_output"], found["layers.0.output"])
    assert found["attention_mask"].dtype == torch.int64 and (found["attention_mask"] == 1).all()
    mixture = vlscope_model(MIXTURE)
    (site, *_) = vlscope.sites.expand(mixture, "layers.*.mlp.expert_indices")
    collect(mixture, ["Hello"], site, tmp_path / "mixture", dtype=torch.float16)
    with mixture.trace("Hello") as tracer:
        indices = tracer.root.get(site).clone()
    assert torch.equal(stored(tmp_path / "mixture")[site], indices[0])
    assert vlscope.ActivationDataset(tmp_path / "mixture").statistics[site] is None


def test_a_part_is_an_ordinary_safetensors_file_of_seven_tensors(model, tmp_path):
    from safetensors.torch import load_file

    collect(model, mixed(), SITE, tmp_path)
    tensors = load_file(tmp_path / SITE / "shard-0-of-1" / "part-000000.safetensors")
    found = stored(tmp_path)
    assert set(tensors) == {"rows", *rows.COLUMNS}
    assert torch.equal(tensors["rows"], found[SITE])
    for name in rows.COLUMNS:
        assert tensors[name].dtype == torch.int64 and torch.equal(tensors[name], found[name])


def test_the_forward_stops_at_the_last_site(model, tmp_path):
    """Told by the matrix products: none has the width of the vocabulary, and an early block costs fewer."""

    def products(site):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            collect(model, ["Hello there"], site, tmp_path / site)
        return sum(event.name in ("aten::addmm", "aten::mm") for event in seen.events())

    first, last = products("layers.0.layer_output"), products("layers.5.layer_output")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model("Hello there")
    whole = sum(event.name in ("aten::addmm", "aten::mm") for event in seen.events())
    assert 0 < first < last < whole


def test_nothing_is_run_where_no_row_is_kept(model, tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        collect(model, ["Hello", "there"], SITE, tmp_path, rows="image")
    assert not any(event.name in ("aten::addmm", "aten::mm") for event in seen.events())
    assert len(vlscope.ActivationDataset(tmp_path)) == 0


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"sites": "layers.*.layer_outputs"}, vlscope.UnknownSite, "Did you mean layer_output"),
        ({"sites": "next_token_probs"}, vlscope.InputError, "one row of a fixed shape"),
        ({"sites": "layers.0.self_attn.attention_probabilities"}, vlscope.InputError, "one row of a fixed shape"),
        ({"sites": "vision.layers.0.self_attn.image_attention_scores"}, vlscope.InputError, "fixed shape"),
        ({"sites": "projector.output"}, vlscope.InputError, "give a named value"),
        ({"sites": []}, vlscope.InputError, "at least one"),
        ({"rows": "images"}, vlscope.InputError, "'image'"),
        ({"rows": "last", "sites": "vision.layers.0.layer_output"}, vlscope.InputError, "keeps nothing of vision"),
        ({"dtype": "int8"}, vlscope.InputError, "float16"),
        ({"batch_size": 0}, vlscope.InputError, "batch_size is 0"),
        ({"part_bytes": 0.5}, vlscope.InputError, "part_bytes is 0.5"),
        ({"on_error": "pass"}, vlscope.InputError, '"skip"'),
        ({"shard": "4/4"}, vlscope.InputError, "the last 3"),
        ({"shard": "1"}, vlscope.InputError, '"i/N"'),
        ({"backend": "slurm"}, vlscope.InputError, '"ray"'),
        ({"backend": "ray", "shard": "1/4"}, vlscope.InputError, "shards=N"),
        ({"dataset": 5}, vlscope.InputError, "dataset is int"),
        ({"dataset": {"prompt": "Hello"}}, vlscope.InputError, "mapping"),
    ],
    ids=str,
)
def test_what_cannot_be_collected_is_refused_before_anything_is_written(model, tmp_path, given, error, said):
    with pytest.raises(error, match=said):
        collect(model, **{"dataset": ["Hello"], "sites": SITE, "out": tmp_path / "out", **given})
    assert not (tmp_path / "out").exists()


def test_a_native_value_without_names_is_collected_where_it_is_a_token_stream(model, tmp_path):
    site = "layers.1.mlp.act_fn.output"
    collect(model, mixed(), site, tmp_path)
    values = plain(model, mixed(), [site])[site]
    assert torch.equal(stored(tmp_path)[site], torch.cat([value[0] for value in values]))
