"""Reading back: mapped from disk, every row once an epoch, and the statistics of what is stored."""

import functools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import vlscope
from vlscope.collection import Statistics, merge, reader

from .samples import image_prompt, stored, text_prompts

collect = functools.partial(vlscope.collect, progress=False)

SITES = ["layers.1.layer_output", "layers.3.layer_output"]


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Three shards of several parts each."""
    out = tmp_path_factory.mktemp("acts")
    for shard in range(3):
        collect(model, text_prompts(30), SITES, out, shard=(shard, 3), part_bytes=20_000)
    return out


@pytest.fixture
def acts(folder, monkeypatch):
    monkeypatch.setattr(reader, "_CHUNK", 16)  # many runs of rows, as a large collection has
    return vlscope.ActivationDataset(folder)


def keys(batch):
    return list(zip(batch["sample"].tolist(), batch["position"].tolist(), strict=True))


def test_a_row_is_the_same_row_of_every_column(acts, folder):
    everything = acts[:]
    assert acts.columns == (*SITES, "sample", "position", "token_id", "image", "grid_row", "grid_col")
    assert len(acts) == len(everything["sample"]) > 500 and acts.complete
    for index in (0, 17, -1, len(acts) // 2):
        for name, value in acts[index].items():
            assert torch.equal(value, everything[name][index])
    chosen = [5, 400, 3, 3, -2]
    for name, value in acts[chosen].items():
        assert torch.equal(value, everything[name][chosen])
    mask = everything["position"] == 0
    assert acts[mask]["sample"].tolist() == everything["sample"][mask].tolist()
    single = vlscope.ActivationDataset(folder, SITES[1])
    assert single.sites == (SITES[1],) and torch.equal(single[SITES[1]][:], everything[SITES[1]])


def test_a_column_is_indexed_like_a_tensor_and_read_when_it_is(acts):
    column = acts[SITES[0]]
    whole = column[:]
    assert column.shape == whole.shape == (len(acts), 64) and column.dtype == whole.dtype == torch.float32
    assert len(column) == len(acts) and torch.equal(column[10:20], whole[10:20]) and torch.equal(column[-1], whole[-1])
    assert torch.equal(torch.stack(list(column)), whole)
    assert torch.equal(acts["token_id"][[1, 2]], acts[:3]["token_id"][1:])


def test_rows_are_mapped_and_not_loaded(acts):
    """A part that is asked for one row is a mapping of its file, which no other row is read from."""
    acts[0]
    mapped = acts._mapped(0, SITES[0])
    with open("/proc/self/maps") as maps:
        assert any("part-000000.safetensors" in line for line in maps)
    assert torch.equal(mapped["rows"][0], acts[0][SITES[0]])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 7])
def test_every_row_comes_exactly_once_an_epoch_across_workers(acts, workers, seed):
    loader = DataLoader(acts.stream(50, seed=seed, columns=["sample", "position"], pool=4), None, num_workers=workers)
    seen = [key for batch in loader for key in keys(batch)]
    assert len(seen) == len(acts) and set(seen) == set(keys(acts[:]))


def test_the_processes_of_a_training_share_the_rows_out(acts):
    streams = [acts.stream(50, seed=1, columns=["sample", "position"], shard=(rank, 4)) for rank in range(4)]
    seen = [{key for batch in stream for key in keys(batch)} for stream in streams]
    assert sum(map(len, seen)) == len(acts) and set().union(*seen) == set(keys(acts[:]))
    assert all(seen)


def test_the_order_follows_from_seed_and_epoch_and_mixes_the_parts(acts):
    def order(seed, epoch=0):
        stream = acts.stream(64, seed=seed, columns=["sample", "position"], pool=8)
        stream.set_epoch(epoch)
        return [key for batch in stream for key in keys(batch)]

    assert order(3) == order(3) and len({tuple(order(*case)) for case in ((3, 0), (4, 0), (3, 1))}) == 3
    assert order(None) == keys(acts[:])
    first = [sample for sample, _ in order(3)[:64]]
    assert {sample % 3 for sample in first} == {0, 1, 2}, "the first batch has rows of every shard"
    assert len(set(first)) > 4


def test_batches_of_a_column_are_what_trains_an_autoencoder(acts):
    column = acts[SITES[1]]
    batches = list(column.batches(64, seed=0, epochs=2))
    assert all(batch.shape == (64, 64) for batch in batches[: len(acts) // 64])
    total = column[:].double().sum(0)
    torch.testing.assert_close(torch.cat(batches).double().sum(0), 2 * total)
    endless = column.batches(len(acts), seed=0, epochs=None)
    first, second = next(endless), next(endless)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def test_a_map_style_loader_shuffles_it_too(acts):
    loader = DataLoader(acts, batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = list(loader)
    assert batches[0][SITES[0]].shape == (100, 64)
    assert sorted(key for batch in batches for key in keys(batch)) == sorted(keys(acts[:]))


def test_a_dataset_pickles(acts):
    again = pickle.loads(pickle.dumps(acts))
    assert torch.equal(again[SITES[0]][:], acts[SITES[0]][:])


def test_statistics_are_the_mean_and_variance_of_the_rows_as_stored(acts, folder, model, tmp_path):
    for site in SITES:
        rows, found = acts[site][:].double(), acts.statistics[site]
        assert found.count == len(acts)
        torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.variance, rows.var(0, correction=0), rtol=1e-11, atol=1e-12)
    merged = merge(folder)
    assert torch.equal(merged.statistics[SITES[0]].mean, acts.statistics[SITES[0]].mean)
    assert merged.samples == 30 and merged.rows[SITES[0]] == len(acts)
    collect(model, text_prompts(6), SITES[:1], tmp_path, dtype="float16")
    half = vlscope.ActivationDataset(tmp_path)
    rows = half[SITES[0]][:]
    assert rows.dtype == torch.float16
    torch.testing.assert_close(half.statistics[SITES[0]].mean, rows.double().mean(0), rtol=1e-12, atol=1e-12)


def test_statistics_of_parts_merge_to_those_of_the_whole_far_from_zero():
    """Where the sum of squares would lose all digits of the variance."""
    rows = torch.randn(1000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e9
    parts = [Statistics.of(part) for part in rows.split([1, 499, 0, 500])]
    merged = functools.reduce(Statistics.merged, parts)
    assert merged.count == 1000
    torch.testing.assert_close(merged.mean, rows.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(merged.variance, rows.var(0, correction=0), rtol=1e-6, atol=0)


def test_merging_names_the_shards_that_are_missing_or_of_another_collection(model, tmp_path):
    data = text_prompts(6)
    with pytest.raises(vlscope.CollectionError, match="holds no collection"):
        merge(tmp_path)
    collect(model, data, SITES, tmp_path, shard="1/4")
    with pytest.raises(vlscope.CollectionError, match=r"lacks 3 of 4 shards: 0/4, 2/4, 3/4"):
        merge(tmp_path)
    assert not vlscope.ActivationDataset(tmp_path).complete
    other = tmp_path / "other"
    for shard in (0, 2, 3):
        collect(model, data, SITES, other, shard=(shard, 4), rows="last")
        (other / f"shard-{shard}-of-4.json").rename(tmp_path / f"shard-{shard}-of-4.json")
    with pytest.raises(vlscope.CollectionError, match=r"two collections: rows is"):
        merge(tmp_path)


def test_sites_whose_rows_are_not_the_same_are_read_one_at_a_time(model, tmp_path):
    sites = ["vision.layers.0.layer_output", "layers.0.layer_output"]
    collect(model, [image_prompt(0)], sites, tmp_path)
    with pytest.raises(vlscope.InputError, match=r"layers\.0\.layer_output \(\d+ rows along seq\)"):
        vlscope.ActivationDataset(tmp_path)
    for site in sites:
        assert len(vlscope.ActivationDataset(tmp_path, site)) == len(stored(tmp_path, site)["sample"]) > 0
    with pytest.raises(vlscope.InputError, match="was not collected"):
        vlscope.ActivationDataset(tmp_path, "layers.1.layer_output")


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (lambda acts: acts["rows"], vlscope.InputError, "no column 'rows'"),
        (lambda acts: acts[10**9], IndexError, "row 1000000000"),
        (lambda acts: acts[torch.ones(3, dtype=torch.bool)], vlscope.InputError, r"a mask of \[3\]"),
        (lambda acts: acts[1.5], vlscope.InputError, "integers"),
        (lambda acts: acts.stream(0), vlscope.InputError, "batch_size is 0"),
        (lambda acts: acts.stream(8, shard=(4, 4)), vlscope.InputError, "the last 3"),
        (lambda acts: vlscope.ActivationDataset(acts.path, []), vlscope.InputError, "sites is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_there_is_refused(acts, act, error, said):
    with pytest.raises(error, match=said):
        act(acts)
