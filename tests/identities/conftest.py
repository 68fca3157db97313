"""The models that every identity is held on, and the prompts of each."""

from types import SimpleNamespace

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
def prompts(name, inputs):
    """prompts.text, prompts.one_image, ...: the inputs of each case."""
    cases = ("text", "one_image", "two_images", "padded_text", "padded_mixed", "videos", "images_and_videos")
    return SimpleNamespace(**{case: inputs(name, case) for case in cases})
