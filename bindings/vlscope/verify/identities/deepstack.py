"""DeepStack: which blocks have it, what it adds and where, and what comes of writing it."""

from __future__ import annotations

import torch

from ...errors import NotReachedError, Unavailable
from ...sites import read
from .identity import Model, Prompts, equal, identity, logits_of, moved, raises, require, values


def _indexes(model: Model) -> list[int]:
    """The tower blocks that are tapped, in the order in which the config names their mergers."""
    indexes: list[int] = model.config["vision_config"].get("deepstack_visual_indexes") or []
    return indexes


def _has_taps(model: Model) -> bool:
    return bool(_indexes(model)) and hasattr(model.vision, "deepstack_merger_list")


def _levels(model: Model) -> int:
    """The text blocks behind which a level is added."""
    return min(len(_indexes(model)), model.num_layers)


def _entering(model: Model, k: int) -> str:
    """Where the stream is read after the add behind block k."""
    return f"layers.{k + 1}.input" if k + 1 < model.num_layers else "norm.input"


@identity(_has_taps)
def only_the_first_blocks_have_a_level(model: Model, prompts: Prompts) -> None:
    for k, layer in enumerate(model.layers):
        error = Unavailable if k >= _levels(model) else ValueError  # ValueError: it is there, and no trace is open
        raises(error, lambda layer=layer: layer.deepstack_output, f"layers.{k}.deepstack_output")  # type: ignore[misc]


@identity(_has_taps)
def each_level_is_the_output_of_the_merger_of_its_tapped_block(model: Model, prompts: Prompts) -> None:
    """Levels go by the order of the tapped blocks, mergers by the order in which the config names them."""
    indexes = _indexes(model)
    for merger, block in enumerate(indexes):
        reads = f"vision.deepstack_merger_list.{merger}.input"
        out, fed = values(model, prompts.two_images, f"vision.layers.{block}.output", reads)
        equal(fed, out, reads)
    for level, block in enumerate(sorted(indexes)[: _levels(model)]):
        adds = f"layers.{level}.deepstack_output"
        makes = f"vision.deepstack_merger_list.{indexes.index(block)}.output"
        made, added = values(model, prompts.two_images, makes, adds)
        equal(added, made, adds)


@identity(_has_taps)
def a_level_is_added_at_the_visual_tokens_and_nowhere_else(model: Model, prompts: Prompts) -> None:
    for inputs in (prompts.one_image, prompts.padded_mixed, prompts.images_and_videos):
        for k in range(_levels(model)):
            names = (f"layers.{k}.layer_output", f"layers.{k}.deepstack_output", _entering(model, k))
            mask, out, added, after = values(model, inputs, "vision.visual_token_mask", *names)
            equal(after[mask], out[mask] + added, f"{names[2]} at the visual tokens")
            equal(after[~mask], out[~mask], f"{names[2]} elsewhere")


@identity(_has_taps)
def a_zeroed_level_leaves_the_stream_and_moves_the_logits(model: Model, prompts: Prompts) -> None:
    clean = logits_of(model, prompts.one_image)
    for k in range(_levels(model)):
        with model.trace(**prompts.one_image):
            out = model.layers[k].layer_output
            model.layers[k].deepstack_output[:] = 0
            after = read(model, _entering(model, k))
            logits = model.logits
        equal(after, out, _entering(model, k))
        moved(logits, clean, f"the logits without layers.{k}.deepstack_output")


@identity(_has_taps)
def an_assigned_level_of_ones_adds_one(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.one_image):
        mask = model.vision.image_token_mask
        out = model.layers[0].layer_output
        model.layers[0].deepstack_output = torch.ones_like(model.layers[0].deepstack_output)
        after = read(model, _entering(model, 0))
    equal(after[mask], out[mask] + 1, _entering(model, 0))


@identity()
def past_the_levels_a_block_reads_what_the_last_one_left(model: Model, prompts: Prompts) -> None:
    for k in range(_levels(model) if _has_taps(model) else 0, model.num_layers - 1):
        with model.trace(**prompts.one_image):
            require(model.layers[k].layer_output is model.layers[k + 1].input, f"layers.{k + 1}.input")


@identity(_has_taps)
def a_text_reaches_no_level(model: Model, prompts: Prompts) -> None:
    with model.trace(**prompts.text):
        raises(NotReachedError, lambda: model.layers[0].deepstack_output, "layers.0.deepstack_output")
        out = model.layers[0].layer_output
        require(read(model, _entering(model, 0)) is out, f"{_entering(model, 0)} is not layers.0.layer_output")
