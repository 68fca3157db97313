"""What no file of a checkpoint may do: run code, lead out of its folder, or have memory taken for what is not there."""

import ast
import json
import resource
import struct
from pathlib import Path

import pytest

import tiny
import vlscope

PACKAGE = Path(vlscope.__file__).parent
UNPICKLERS = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}


def faults_of(source):
    """The calls and imports of a module that could run what a file says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (name for name in names if name.split(".")[0] in UNPICKLERS)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"torch.load", "eval", "exec", "np.load", "numpy.load"}:
                yield called
            yield from (word.arg for word in node.keywords if word.arg in {"trust_remote_code", "allow_pickle"})


@pytest.mark.parametrize("line", ["import pickle", "torch.load(path)", "f(trust_remote_code=True)", "exec(text)"])
def test_the_search_for_code_that_runs_files_finds_it(line):
    assert list(faults_of(line))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_of_the_package_runs_what_a_file_says(path):
    assert not list(faults_of(path.read_text()))


def without_weights(folder):
    """The built-in model's folder, but for its weights."""
    for path in tiny.DEMO.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/hostname", "sub/../../model.safetensors"])
def test_an_index_leads_to_no_file_outside_its_folder(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "model.safetensors").symlink_to(tiny.DEMO / "model.safetensors")
    index = {"weight_map": {"model.language_model.norm.weight": shard}}
    (without_weights(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(vlscope.CheckpointError, match="not the name of a file inside the folder"):
        vlscope.load(folder)


@pytest.mark.parametrize(
    "shape, message",
    [
        ([1 << 40], "takes 4398046511104 bytes, but data_offsets"),
        ([1 << 62, 1 << 62], "too large to count"),
        ([0, 1 << 62, 1 << 62], "too large to count"),
    ],
)
def test_a_size_that_a_file_only_claims_takes_no_memory(tmp_path, shape, message):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"model.language_model.norm.weight": entry}).encode()
    (without_weights(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(vlscope.CheckpointError, match=message):
        vlscope.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
