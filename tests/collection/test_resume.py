"""A collection goes on where it ended, however it ended, and with nothing but what it was begun with."""

import errno
import functools
import itertools
import json
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch
from PIL import Image

import tiny
import vlscope
from vlscope.collection import files, manifest, rows

from . import children
from .samples import image_prompt, stored, text_prompts, write_jsonl

collect = functools.partial(vlscope.collect, progress=False)

SITES = ["layers.1.layer_output", "layers.3.layer_output"]
PARTS = {"part_bytes": 12_000}  # some parts to a run


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


@pytest.fixture(scope="module")
def data():
    return text_prompts(40)


@pytest.fixture(scope="module")
def uninterrupted(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    collect(model, data, SITES, out, **PARTS)
    return stored(out)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        assert torch.equal(found[name], column), name


def committed(out):
    """The manifest of a folder, if there is one, and what tells whether its parts were written again."""
    path = out / "shard-0-of-1.json"
    if not path.exists():
        return 0, {}
    found = manifest.Manifest.load(path)
    paths = [manifest.part_path(out, site, found.shard, part.name) for part in found.parts for site in part.rows]
    return found.done, {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_cs_06_twenty_kills_at_random_moments_lose_and_repeat_nothing(model, data, uninterrupted, tmp_path):
    def work():
        collect(model, data, SITES, tmp_path, **PARTS)

    began = time.monotonic()
    assert children.run(work) == 0
    whole = time.monotonic() - began
    shutil.rmtree(tmp_path)
    chance, kills, done, parts = random.Random(0), 0, 0, {}
    while kills < 20:
        child = children.start(work)
        time.sleep(chance.uniform(0, whole / 3))
        os.kill(child, signal.SIGKILL)
        kills += children.ended(child) == -signal.SIGKILL
        now, written = committed(tmp_path)
        assert now >= done and parts.items() <= written.items(), "what was stored is not written again"
        if written:
            found = stored(tmp_path)
            assert_same(found, {name: column[: len(found["sample"])] for name, column in uninterrupted.items()})
        done, parts = now, written
        if now == len(data):  # all through: once more from the beginning
            assert_same(stored(tmp_path), uninterrupted)
            shutil.rmtree(tmp_path)
            done, parts = 0, {}
    work()
    assert_same(stored(tmp_path), uninterrupted)


def test_cs_06_a_kill_at_any_step_of_the_writing_loses_and_repeats_nothing(model, data, tmp_path):
    """Before each place where a file is brought to the disk or takes its name, one after the other."""
    few, small = data[:6], {"part_bytes": 15_000}
    collect(model, few, SITES, tmp_path / "whole", **small)
    wanted = stored(tmp_path / "whole")
    assert len(committed(tmp_path / "whole")[1]) >= 2 * len(SITES)

    def killed_at(place, out):
        count = itertools.count()

        def deadly(call):
            def wrapped(*arguments):
                if next(count) == place:
                    os.kill(os.getpid(), signal.SIGKILL)
                call(*arguments)

            return wrapped

        os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
        collect(model, few, SITES, out, **small)

    for place in itertools.count():
        out = tmp_path / str(place)
        if children.run(lambda place=place, out=out: killed_at(place, out)) == 0:
            break
        done, parts = committed(out)
        collect(model, few, SITES, out, **small)
        assert parts.items() <= committed(out)[1].items()
        assert_same(stored(out), wanted)
        left = {path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")}
        assert left == {out / "shard-0-of-1.json", *committed(out)[1]}, "nothing of the killed run is left"
    assert place > 10


def test_a_complete_collection_is_not_run_again(model, data, tmp_path):
    collect(model, data, SITES, tmp_path, **PARTS)
    before = committed(tmp_path)
    again = collect(model, data, SITES, tmp_path, **PARTS)
    assert committed(tmp_path) == before and again.samples == len(data)


@pytest.mark.parametrize("kind", ["iterable", "sequence", "jsonl", "datasets"])
def test_one_shard_and_four_have_the_same_rows_to_the_bit(model, tmp_path, kind):
    path = write_jsonl(tmp_path / "data", 7)

    def dataset():
        if kind == "jsonl":
            return path
        if kind == "datasets":
            from datasets import Dataset

            samples = [json.loads(line) for line in path.read_text().splitlines()]
            for sample in samples:
                sample["images"] = [str(path.parent / image) for image in sample["images"]]
            return Dataset.from_list(samples)
        return [image_prompt(k) for k in range(7)] if kind == "sequence" else map(image_prompt, range(7))

    sites = ["layers.2.layer_output", "vision.image_features"]
    collect(model, dataset(), sites, tmp_path / "one", rows="image")
    for shard in range(4):
        collect(model, dataset(), sites, tmp_path / "four", rows="image", shard=f"{shard}/4")
    assert_same(stored(tmp_path / "four"), stored(tmp_path / "one"))
    for k, part in enumerate(sorted((tmp_path / "four" / sites[0]).iterdir())):
        one = vlscope.ActivationDataset(tmp_path / "four")
        assert part.name == f"shard-{k}-of-4" and len(one)
    merged = vlscope.collection.merge(tmp_path / "four", hashes=True)
    assert merged.samples == 7 and merged.rows["vision.image_features"] == len(stored(tmp_path / "one")["sample"])


def other_function(index):
    return index.position < 3


CHANGES = {
    "rows": ({"rows": "last"}, r"rows is 'last' here and 'all' there"),
    "a function of rows": ({"rows": other_function}, r"rows is '.*other_function \w+' here"),
    "dtype": ({"dtype": "float16"}, r"dtype is 'float16' here and None there"),
    "sites": ({"sites": SITES[:1]}, r"sites is \['layers.1.layer_output'\] here"),
    "shards": ({"shard": "0/2"}, r"shards is 2 here and 1 there"),
    "fewer samples": ({"dataset": text_prompts(39)}, r"data.samples is 39 here and 40 there"),
    "another sample": ({"dataset": ["Hello", *text_prompts(40)[1:]]}, r"40 samples of shard-0-of-1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_configuration_or_other_data_are_refused_and_nothing_is_touched(model, data, tmp_path, name):
    collect(model, data, SITES, tmp_path, **PARTS)
    before = committed(tmp_path)
    change, said = CHANGES[name]
    with pytest.raises(vlscope.CollectionError, match=said) as refused:
        collect(model, **{"dataset": data, "sites": SITES, "out": tmp_path, **change})
    assert str(tmp_path) in str(refused.value)
    assert committed(tmp_path) == before


def test_a_function_of_the_same_name_and_other_code_is_another_choice():
    def made(limit):
        exec(f"def choice(index):\n    return index.position < {limit}", namespace := {"__name__": "script"})
        return rows.describe_rows(namespace["choice"])

    assert made(3) == made(3) != made(4)
    assert rows.describe_rows("image") == "image"


@pytest.mark.parametrize("changed", ["weights", "config", "processor", "edits"])
def test_cs_06_data_of_another_model_are_refused(model, tmp_path, changed):
    folder = tmp_path / "model"
    shutil.copytree(tiny.DEMO, folder)
    collect(model, ["Hello"], SITES, tmp_path / "out")
    collect(vlscope.load(folder), ["Hello"], SITES, tmp_path / "out")  # a copy is the same model
    if changed == "weights":
        tiny.restore(folder, lambda stored: {name: value * 1.01 for name, value in stored.items()})
    elif changed != "edits":
        name = "config.json" if changed == "config" else "preprocessor_config.json"
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "one_more": 1}))
    other = vlscope.load(folder)
    if changed == "edits":
        other.edit("layers.0.layer_output", torch.zero_)
    with pytest.raises(vlscope.CollectionError, match=rf"model\.{changed}"):
        collect(other, ["Hello"], SITES, tmp_path / "out")


def test_cs_06_files_of_unknown_origin_are_refused(model, tmp_path):
    stranger = tmp_path / SITES[0] / "shard-0-of-1" / "part-000000.safetensors"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"theirs")
    with pytest.raises(vlscope.CollectionError, match="no manifest says of what"):
        collect(model, ["Hello"], SITES, tmp_path)
    assert stranger.read_bytes() == b"theirs"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "vlscope activations 1"}', "\0\0"])
def test_a_damaged_manifest_is_refused_by_name(model, tmp_path, content):
    (tmp_path / "shard-0-of-1.json").write_text(content)
    with pytest.raises(vlscope.CollectionError, match="shard-0-of-1.json"):
        collect(model, ["Hello"], SITES, tmp_path)
    with pytest.raises(vlscope.CollectionError, match="shard-0-of-1.json"):
        vlscope.ActivationDataset(tmp_path)


def test_cs_06_a_part_that_was_cut_off_is_never_read_and_never_gone_on_with(model, data, tmp_path):
    collect(model, data, SITES, tmp_path, **PARTS)
    path = sorted(committed(tmp_path)[1])[0]
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", None):
        path.unlink() if content is None else path.write_bytes(content)
        for act in (
            lambda: vlscope.ActivationDataset(tmp_path),
            lambda: vlscope.collection.merge(tmp_path),
            lambda: collect(model, data, SITES, tmp_path, **PARTS),
        ):
            with pytest.raises(vlscope.CollectionError, match=rf"{path}.*{len(whole)}"):
                act()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    vlscope.collection.merge(tmp_path)
    with pytest.raises(vlscope.CollectionError, match=rf"{path} is not what was written"):
        vlscope.collection.merge(tmp_path, hashes=True)
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(vlscope.CollectionError, match=rf"{path} is damaged"):
        vlscope.ActivationDataset(tmp_path)[0]


@pytest.mark.parametrize("limit", [5_000, 14_000], ids=["a part", "the manifest, some parts later"])
def test_cs_06_what_the_disk_does_not_take_is_an_error_with_the_path_and_the_same_call_goes_on(
    model, data, uninterrupted, tmp_path, limit
):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError) as full:
            collect(model, data, SITES, tmp_path, **PARTS)
        assert full.value.errno == errno.EFBIG and full.value.filename.startswith(str(tmp_path))

    assert children.run(work) == 0
    assert (committed(tmp_path)[0] > 0) == (limit == 14_000) and not list(tmp_path.rglob("*.tmp"))
    collect(model, data, SITES, tmp_path, **PARTS)
    assert_same(stored(tmp_path), uninterrupted)


def test_cs_06_a_folder_that_cannot_be_written_is_refused_by_name(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/out"):
        collect(model, ["Hello"], SITES, tmp_path / "file" / "out")


def test_two_processes_at_one_shard_do_not_write_both(model, tmp_path):
    lock = tmp_path / ".shard-0-of-1.lock"
    with files.exclusive(lock, "it"), pytest.raises(vlscope.CollectionError, match="another process"):
        collect(model, ["Hello"], SITES, tmp_path)
    collect(model, ["Hello"], SITES, tmp_path)


# --- samples that fail ---


@pytest.fixture
def broken(tmp_path):
    """Seven prompts, the sixth with an image that was cut off."""
    path = write_jsonl(tmp_path / "data", 7)
    image = path.parent / "images" / "5.png"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    return path, image, whole


@pytest.mark.parametrize("batch_size", [1, 3])
def test_cs_08_stop_names_the_sample_and_keeps_what_came_before(model, tmp_path, broken, batch_size):
    path, image, whole = broken
    out = tmp_path / "out"
    with pytest.raises(vlscope.CollectionError, match=r"sample 5: .*5\.png") as stopped:
        collect(model, path, SITES, out, batch_size=batch_size)
    assert isinstance(stopped.value.__cause__, vlscope.InputError)
    assert sorted(set(stored(out)["sample"].tolist())) == [0, 1, 2, 3, 4]
    assert not vlscope.ActivationDataset(out).complete
    with pytest.raises(vlscope.CollectionError, match="not complete: 5 "):
        vlscope.collection.merge(out)
    image.write_bytes(whole)
    collect(model, path, SITES, out)
    assert sorted(set(stored(out)["sample"].tolist())) == list(range(7))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_cs_08_skip_keeps_the_others_under_their_own_numbers_and_lists_it(model, tmp_path, broken, batch_size):
    path, image, whole = broken
    skipping = collect(model, path, SITES, tmp_path / "skipped", on_error="skip", batch_size=batch_size)
    ((sample, message),) = skipping.skipped
    assert sample == 5 and "5.png" in message and skipping.samples == 7
    assert vlscope.collection.merge(tmp_path / "skipped").skipped == skipping.skipped
    image.write_bytes(whole)
    collect(model, path, SITES, tmp_path / "all")
    everything, found = stored(tmp_path / "all"), stored(tmp_path / "skipped")
    kept = everything["sample"] != 5
    assert torch.equal(found["sample"], everything["sample"][kept])
    torch.testing.assert_close(found[SITES[1]], everything[SITES[1]][kept], rtol=1e-4, atol=1e-4)


def test_a_sample_that_fails_in_the_forward_is_found_among_its_batch(model, tmp_path):
    data = ["Hello", "there", {"input_ids": torch.tensor([[10**6]])}, "World"]
    skipping = collect(model, data, SITES, tmp_path, batch_size=4, on_error="skip")
    assert [sample for sample, _ in skipping.skipped] == [2] and "InputError" in skipping.skipped[0][1]
    assert sorted(set(stored(tmp_path)["sample"].tolist())) == [0, 1, 3]


def test_a_number_beyond_float16_is_an_error_and_no_infinity(model, tmp_path):
    with (
        model.edit("layers.3.layer_output", lambda value: value * 1e6),
        pytest.raises(
            vlscope.CollectionError, match=r"sample 0: layers\.3\.layer_output has .* torch.float16 ends at 6\.55e\+04"
        ),
    ):
        collect(model, ["Hello"], SITES, tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"text": "Hello"}, '"prompt" or "messages"'),
        ({"prompt": "Hello", "messages": []}, "both"),
        ({"prompt": "Hello", "image": Image.new("RGB", (64, 64))}, '"images"'),
        ({"prompt": "Hello", "images": ["no/such.png"]}, "no/such.png"),
        ({"input_ids": torch.tensor([[5, 6], [7, 8]])}, "a batch of 2"),
        ({"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.zeros(1, 2, dtype=torch.long)}, "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sample_that_is_none_is_named_with_what_is_wrong(model, tmp_path, sample, said):
    with pytest.raises(vlscope.CollectionError, match="sample 1: ") as error:
        collect(model, ["Hello", sample], SITES, tmp_path)
    assert said in str(error.value)


@pytest.mark.parametrize("line", ["{", "[1, 2]", '"text"'])
def test_a_line_that_is_no_sample_is_named_with_its_number(model, tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "Hello"}}\n\n{line}\n')
    with pytest.raises(vlscope.CollectionError, match=r"sample 1: .*data\.jsonl, line 3"):
        collect(model, path, SITES, tmp_path / "out")


# --- Ctrl-C, memory, overlap ---


def test_en_01_an_interrupt_ends_a_collection_within_two_seconds_of_work_and_it_goes_on(
    model, data, uninterrupted, tmp_path
):
    """Seconds of the processor, so that a busy machine does not count."""
    ticking = tmp_path / "ticking"

    def endless():
        for k, sample in enumerate(itertools.cycle(data)):
            if k == 30:
                ticking.touch()
            yield sample

    def work():
        taken = []

        def interrupt(*_):
            taken.append(time.process_time())
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        with pytest.raises(KeyboardInterrupt):
            collect(model, endless(), SITES, tmp_path / "out", **PARTS)
        assert time.process_time() - taken[0] < 2
        with model.trace("Hello"):
            assert torch.isfinite(model.logits).all()

    child = children.start(work)
    while not ticking.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGINT)
    assert children.ended(child) == 0
    found = stored(tmp_path / "out")
    count = min(len(found["sample"]), len(uninterrupted["sample"]))
    assert count and torch.equal(found[SITES[0]][:count], uninterrupted[SITES[0]][:count])
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_memory_is_bounded_however_long_the_run(model, tmp_path):
    """26 MB of rows, of which three parts of 1 MB are held at a time."""

    def work():
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

        ids = torch.arange(500)[None] % 300
        options = {"sites": "layers.0.layer_output", "part_bytes": 1 << 20}
        collect(model, ({"input_ids": ids} for _ in range(10)), out=tmp_path / "short", **options)
        before = peak()
        collect(model, ({"input_ids": ids} for _ in range(200)), out=tmp_path / "long", **options)
        assert peak() - before < 10, peak() - before

    assert children.run(work) == 0


def test_parts_are_written_while_the_next_rows_are_computed(model, monkeypatch, tmp_path):
    """The first part is held up in the writer until a later sample has been asked for."""
    import threading

    later = threading.Event()
    write = files.write_tensors

    def held_up(path, tensors):
        assert later.wait(60), "nothing was computed while a part was written"
        return write(path, tensors)

    monkeypatch.setattr("vlscope.collection.writer.write_tensors", held_up)

    def samples():
        for k in range(4):
            if k == 2:
                later.set()
            yield "Hello"

    class Counted:
        def __iter__(self):
            return samples()

    collect(model, Counted(), SITES, tmp_path, part_bytes=1)
    assert later.is_set()


class Flaky:
    """A dataset whose third sample cannot be read while `broken`."""

    broken = True

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 2 and self.broken:
            raise ConnectionError("the store does not answer")
        return f"Sample {index}"


def test_a_sample_that_a_dataset_cannot_give_is_skipped_and_not_asked_for_on_resuming(model, tmp_path):
    done = collect(model, Flaky(), SITES, tmp_path, on_error="skip")
    assert done.skipped == ((2, "ConnectionError: the store does not answer"),) and done.samples == 6
    mended = Flaky()
    mended.broken = False
    assert collect(model, mended, SITES, tmp_path, on_error="skip") == done
    with pytest.raises(vlscope.CollectionError, match="sample 2: the store does not answer") as stopped:
        collect(model, Flaky(), SITES, tmp_path / "stopped")
    assert isinstance(stopped.value.__cause__, ConnectionError)


def test_whatever_ends_a_run_what_came_before_is_stored(model, tmp_path):
    """An error of the caller's own code, which is no sample's."""

    def data(broken):
        yield from ("one", "two")
        if broken:
            raise ZeroDivisionError
        yield "three"

    with pytest.raises(ZeroDivisionError):
        collect(model, data(True), SITES, tmp_path)
    assert set(stored(tmp_path)["sample"].tolist()) == {0, 1}
    assert collect(model, data(False), SITES, tmp_path).samples == 3


def test_weights_that_were_not_loaded_yet_make_no_other_model(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.DEMO, folder)
    tiny.restore(folder, lambda stored: {name: value.bfloat16() for name, value in stored.items()})
    for dispatch in (False, True):
        collect(vlscope.load(folder, dispatch=dispatch), ["Hello"], SITES, tmp_path / "out")
    text = vlscope.load(folder, task="text-generation")
    collect(text, [[5, 6, 7]], SITES, tmp_path / "text")
    assert vlscope.ActivationDataset(tmp_path / "text")[SITES[0]].dtype == torch.bfloat16
