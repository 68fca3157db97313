"""`vlscope collect` and `vlscope collect merge`."""

import pytest
import torch

import vlscope
from vlscope.cli import main

from .samples import stored, write_jsonl

SITE = "layers.2.layer_output"


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data", 5)


def test_shards_on_the_command_line_are_the_rows_of_the_call_and_merge(data, tmp_path, capsys, vlscope_model):
    out = tmp_path / "acts"
    for shard in ("0/2", "1/2", "0/2"):
        common = ["--site", SITE, "--rows", "image", "--dtype", "float16", "--batch-size", "1"]
        assert main(["collect", "demo", "--data", str(data), "--out", str(out), "--shard", shard, *common]) == 0
    said = capsys.readouterr()
    assert "shard 0/2: 3 samples" in said.out and "3 of 3 samples to do" in said.err
    assert main(["collect", "merge", str(out), "--hashes"]) == 0
    assert "5 samples, 0 of them skipped" in capsys.readouterr().out
    vlscope.collect(
        vlscope_model("demo"), data, SITE, tmp_path / "call", rows="image", dtype=torch.float16, progress=False
    )
    for name, column in stored(out).items():
        assert torch.equal(column, stored(tmp_path / "call")[name])


def test_what_was_told_beforehand_is_what_is_written(data, tmp_path, vlscope_model, capsys):
    """All images have one size here, so that the first samples tell for all."""
    for path in (data.parent / "images").glob("*.png"):
        vlscope.demo.picture("red", size=(64, 96)).save(path)
    sites = [SITE, "vision.layers.0.layer_output", "vision.layers.0.self_attn.attention_queries", "attention_mask"]
    done = vlscope.collect(vlscope_model("demo"), data, sites, tmp_path / "acts", dtype="float16")
    told = capsys.readouterr().err
    rows = sum(done.rows.values())
    nbytes = 0
    for site in sites:
        acts = vlscope.ActivationDataset(tmp_path / "acts", site)
        nbytes += sum(column.nbytes for column in acts[:].values())
    assert f"about {rows:,} rows and {nbytes / 1024:.1f} KiB" in told, told


def test_mistakes_are_a_line_and_code_two(data, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    for arguments, said in (
        (["collect", "demo"], "give --data, --site, --out"),
        (["collect", "demo", "--data", "no.jsonl", "--site", SITE, *out], "no.jsonl"),
        (["collect", "demo", "--data", str(data), "--site", "layers.9.layer_output", *out], "there are 6 blocks"),
        (["collect", "demo", "--data", str(data), "--site", SITE, "--shard", "3/2", *out], "shard is 3/2"),
        (["collect", "merge"], "vlscope collect merge DIR"),
        (["collect", "merge", str(tmp_path)], "holds no collection"),
        (["collect", "demo", "acts", "--data", str(data), "--site", SITE, *out], "acts is no option"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert said in error and error.startswith("vlscope: ") and error.count("\n") == 1
    data.write_text('{"prompt": "Hello"}\n{"prompt": 3}\n')
    assert main(["collect", "demo", "--data", str(data), "--site", SITE, *out, "--on-error", "skip"]) == 0
    assert "skipped sample 1" in capsys.readouterr().out


def test_the_help_shows_how_it_is_called(capsys):
    with pytest.raises(SystemExit) as left:
        main(["collect", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "vlscope collect merge acts" in said and "--shard i/N" in said and "relative to the file" in said
