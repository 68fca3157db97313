"""The models that every identity is held on, and the prompts of each."""

import functools
import json

import pytest

from identities.models import ALL


@pytest.fixture(params=ALL)
def name(request):
    return request.param


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


@pytest.fixture
def model(name, attention, vlscope_model):
    return vlscope_model(name, attention)


@pytest.fixture
def given(checkpoint):
    """given(name).text, given(name).one_image, ...: the inputs of each case for a checkpoint."""
    from vlscope.verify import prompts

    return functools.cache(lambda name: prompts.of(json.loads((checkpoint(name) / "config.json").read_text())))


@pytest.fixture
def prompts(name, given):
    """Those of the model at hand."""
    return given(name)
