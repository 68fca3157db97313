"""Checkpoints and models that the whole suite shares. transformers is imported once, by whoever needs it first."""

import functools
import json
import shutil

import pytest
import torch

import tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Last bits depend on the number of threads; every comparison is taken at one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(name): the folder of a tiny random checkpoint, or of the built-in model for "demo"."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def folder(name):
        return tiny.DEMO if name == "demo" else tiny.build(name, root / name)

    return folder


@pytest.fixture(scope="session")
def reference_model(checkpoint):
    """reference_model(name, attn_implementation): transformers' model."""
    from vlscope.verify import reference

    return functools.cache(lambda name, attention: reference.load(checkpoint(name), attention))


@pytest.fixture(scope="session")
def inputs(checkpoint):
    """inputs(name, case): the tensors of a case for a checkpoint."""
    from vlscope.verify.prompts import CASES, Spelling

    @functools.cache
    def make(name, case):
        config = json.loads((checkpoint(name) / "config.json").read_text())
        return CASES[case](Spelling.of(config))

    return make


@pytest.fixture(scope="session")
def reference_run(reference_model, inputs):
    """reference_run(name, attention, case): everything transformers did on a case."""
    from vlscope.verify import reference

    @functools.cache
    def run(name, attention, case):
        return reference.run(reference_model(name, attention), inputs(name, case))

    return run


@pytest.fixture(scope="session")
def vlscope_model(checkpoint):
    """vlscope_model(name, attention): the engine's model of the same folder."""
    import vlscope

    return functools.cache(lambda name, attention="sdpa": vlscope.load(checkpoint(name), attn_implementation=attention))


@pytest.fixture(scope="session")
def model(vlscope_model):
    """The engine's model of the dense tiny checkpoint, which most tests are about; with `text` and `image` for it."""
    return vlscope_model("dense")


@pytest.fixture(scope="session")
def text(inputs):
    return inputs("dense", "text")


@pytest.fixture(scope="session")
def image(inputs):
    return inputs("dense", "one_image")


@pytest.fixture(scope="session")
def processor_folder(tmp_path_factory):
    """processor_folder(file, **settings): the built-in model's processor files, `file` with changed settings."""

    def make(file, **settings):
        folder = tmp_path_factory.mktemp("processor")
        for path in tiny.DEMO.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | settings))
        return folder

    return make


@pytest.fixture(scope="session")
def auto():
    """auto(folder): transformers' processor."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained
