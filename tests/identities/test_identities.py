"""Every identity of `vlscope.verify.identities` holds on every family, and none holds of just anything."""

import pytest
import torch

import vlscope
from identities.models import ALL, RECURRENT
from vlscope.verify import identities

MODELS = [*ALL, "moe", "moe_square", *RECURRENT]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_every_identity_that_applies_to_a_model_holds(name, attention, vlscope_model, given):
    model, prompts = vlscope_model(name, attention), given(name)
    faults = {found.sentence: found.fault(model, prompts) for found in identities.ALL if found.applies(model)}
    assert {sentence: fault for sentence, fault in faults.items() if fault} == {}


def test_each_identity_applies_to_a_model_and_has_a_sentence_of_its_own(vlscope_model):
    models = [vlscope_model(name) for name in MODELS]
    assert [found.sentence for found in identities.ALL if not any(map(found.applies, models))] == []
    named = {(found.suite, found.sentence) for found in identities.ALL}
    assert len(named) == len(identities.ALL)


class Seen:
    """A model as it would be if every value were another tensor: `distort(value)`."""

    def __init__(self, host, distort):
        object.__setattr__(self, "_seen", (host, distort))

    __class__ = property(lambda self: type(self._seen[0]))

    def __getattr__(self, name):
        host, distort = self._seen
        if name == "get":
            return lambda path: distorted(host.get(path), distort)
        return distorted(getattr(host, name), distort)

    def __setattr__(self, name, value):
        setattr(self._seen[0], name, value)

    def __getitem__(self, index):
        host, distort = self._seen
        return distorted(host[index], distort)

    def __len__(self):
        return len(self._seen[0])

    def __call__(self, *args, **kwargs):
        host, distort = self._seen
        return distorted(host(*args, **kwargs), distort)


def distorted(value, distort):
    if isinstance(value, torch.Tensor):
        return distort(value)
    if isinstance(value, tuple):
        return tuple(distorted(part, distort) for part in value)
    return Seen(value, distort) if isinstance(value, (vlscope.Module, vlscope.ModuleList, vlscope.Record)) else value


def noisy(value):
    """Another value at each read."""
    if value.is_floating_point():
        return value + torch.randn_like(value)
    return ~value if value.dtype == torch.bool else value + 1


#: These are about the tree and its sizes, and compare no values.
STRUCTURAL = {
    "a block has the one mixer that its config names",
    "axes of one name have one size",
    "no one tensor is the pattern of a tower block",
    "only the first blocks have a level",
    "sizes are those of the weights",
    "support says what can be read",
}


def test_no_identity_holds_where_values_are_noise_or_writes_are_lost(vlscope_model, given):
    torch.manual_seed(0)
    holds = {found.sentence for found in identities.ALL}
    for name in ("demo", "hybrid_moe", "qwen2", "qwen2_5"):
        model = vlscope_model(name)
        for distort in (noisy, torch.clone):
            seen = Seen(model, distort)
            holds -= {f.sentence for f in identities.ALL if f.applies(model) and f.fault(seen, given(name))}
    assert holds == STRUCTURAL
