"""Lenses: what a state in the middle of the model says, read by the model itself.

* `logit_lens` reads the stream after each block through the final norm and the head;
* `patchscope_lens` and `patchscope_generate` put a state into another prompt and let the model go on
  from there (Ghandeharioun et al. 2024, arXiv:2401.06102);
* `patch_object_attn_lens` has the attention of some blocks read another prompt's state.

Prompts are what `model.trace` takes, one or a batch; one with images is given with `images=`, or as
the dict of the arguments, `{"prompt": "What color is this?", "images": [picture]}`. A position counts
in the prompt's own tokens, those of its images included and padding left out; negatives count from
its end. Results are on the CPU, and no gradient is recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .errors import InputError
from .index_maps import PromptRows, prompt_rows
from .model import StandardizedTransformer
from .prompts import encode_batch

__all__ = [
    "TargetPrompt",
    "it_repeat_prompt",
    "logit_lens",
    "patch_object_attn_lens",
    "patchscope_generate",
    "patchscope_lens",
    "repeat_prompt",
]

Layers = int | Sequence[int] | None
Batch = dict[str, torch.Tensor]


@torch.no_grad()
def logit_lens(
    nn_model: StandardizedTransformer,
    prompts: Any,
    *,
    layers: Layers = None,
    positions: int | Sequence[int] | None = None,
    return_inv_logits: bool = False,
    **inputs: Any,
) -> Any:
    """The next token's probabilities as each block's output has them (nostalgebraist 2020,
    "interpreting GPT: the logit lens"): softmax(head(norm(layer_output))). All layers are read in one
    forward; the last one's are the model's own.

    >>> logit_lens(model, "The capital of France is").argmax(-1)
    tensor([[642, 642, 642, 642, 642, 642]])

    Args:
        layers: blocks, in the order of the result; all by default.
        positions: one, or several, which then have an axis of their own; by default the last.
        return_inv_logits: also give the same of the negated logits: what a state speaks against.
        inputs: of the trace, such as `images=`.

    Returns:
        [prompts, layers, vocab_size], or [prompts, layers, positions, vocab_size]; with
        `return_inv_logits` a pair of them.
    """
    batch = encode_batch(nn_model, prompts, **inputs)
    blocks = _blocks(nn_model, layers)
    places = _places(nn_model, batch, -1 if positions is None else positions)
    rows = torch.arange(len(places)).reshape(-1, *[1] * (places.ndim - 1))
    straight: dict[int, torch.Tensor] = {}
    inverse: dict[int, torch.Tensor] = {}
    with nn_model.trace(**batch):
        for block in sorted(set(blocks)):
            logits = nn_model.project_on_vocab(nn_model.layers[block].layer_output[rows, places])
            straight[block] = logits.softmax(-1).cpu()
            if return_inv_logits:
                inverse[block] = (-logits).softmax(-1).cpu()
    probs = torch.stack([straight[block] for block in blocks], 1)
    return (probs, torch.stack([inverse[block] for block in blocks], 1)) if return_inv_logits else probs


@dataclasses.dataclass
class TargetPrompt:
    """A prompt that a state is put into.

    Attributes:
        prompt: one prompt, or the dict of a trace's arguments.
        index_to_patch: the position that takes the state, in the prompt's own tokens.
    """

    prompt: Any
    index_to_patch: int


def repeat_prompt(
    words: Sequence[str] | None = None,
    rel: str = " ",
    sep: str = "\n",
    placeholder: str = "?",
    index_to_patch: int = -1,
) -> TargetPrompt:
    """A target prompt in which words are repeated, so that the model repeats what is put at its end:
    the token identity prompt of Ghandeharioun et al. 2024.

    >>> repeat_prompt(["cat", "sun"]).prompt
    'cat cat\\nsun sun\\n?'

    Args:
        words: "king", "1135" and "hello" by default.
        rel: between a word and its repetition.
        sep: between the pairs.
        placeholder: what is patched; it should be one token.
    """
    pairs = [f"{word}{rel}{word}" for word in words or ("king", "1135", "hello")]
    return TargetPrompt(sep.join([*pairs, placeholder]), index_to_patch)


def it_repeat_prompt(
    tokenizer: Any,
    words: Sequence[str] | None = None,
    rel: str = " ",
    sep: str = "\n",
    placeholder: str = "?",
    complete_prompt: bool = True,
    add_user_instr: bool = True,
    use_system_prompt: bool = True,
) -> TargetPrompt:
    """`repeat_prompt` in the turns of the chat template, for models tuned to instructions.

    Args:
        tokenizer: a model, or what has an `apply_chat_template`: a processor, or a tokenizer of transformers.
        complete_prompt: have the assistant's turn begin with the repeated words, up to the
            placeholder; else it is left empty, and its opening is patched.
        add_user_instr: give the task in a user turn of its own, which the assistant accepts; else in
            the system turn, or without one before the words.
        use_system_prompt: begin with a system turn.

    Raises:
        InputError: for what has no chat template, as the tokenizer alone.
    """
    template = tokenizer._light_processor() if isinstance(tokenizer, StandardizedTransformer) else tokenizer
    if not hasattr(template, "apply_chat_template"):
        raise InputError(f"{type(template).__name__} has no chat template: give the model, or its processor")
    words_to_repeat = repeat_prompt(words, rel, sep, placeholder).prompt
    task = "You are given lists of words. Say which word comes next, and say nothing else."
    chat: list[tuple[str, str]] = []
    if use_system_prompt:
        chat.append(("system", "You are a helpful assistant." if add_user_instr else task))
    if add_user_instr:
        chat += [("user", task), ("assistant", "Yes."), ("user", words_to_repeat)]
    else:
        chat.append(("user", words_to_repeat if use_system_prompt else f"{task}\n{words_to_repeat}"))
    messages = [{"role": role, "content": text} for role, text in chat]
    if not complete_prompt:
        return TargetPrompt(template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), -1)
    answered = [*messages, {"role": "assistant", "content": words_to_repeat}]
    text = template.apply_chat_template(answered, tokenize=False)
    spoken = words_to_repeat.strip()  # as templates write a message
    return TargetPrompt(text[: text.rindex(spoken) + len(spoken)], -1)


@torch.no_grad()
def patchscope_lens(
    nn_model: StandardizedTransformer,
    source_prompts: Any = None,
    target_patch_prompts: TargetPrompt | Sequence[TargetPrompt] | None = None,
    layers: Layers = None,
    latents: torch.Tensor | None = None,
    *,
    position: int = -1,
    progress: bool = True,
    **inputs: Any,
) -> torch.Tensor:
    """The next token's probabilities in target prompts, with a state of each source prompt in the
    place of one of their tokens, written into the output of one block at a time.

    The sources are run once. The targets are recorded once, and each run begins at the block that is
    written to.

    Args:
        source_prompts: whose states after each of `layers` are used.
        target_patch_prompts: one for all sources or one for each; `repeat_prompt()` by default.
        layers: blocks, in the order of the result; all by default.
        latents: [layers, sources, hidden_size], states of your own in the place of source prompts, as
            of image tokens, or of other blocks than those they are written to.
        position: the token of each source whose state it is, by default the last.
        inputs: of the sources' trace, such as `images=`.

    Returns:
        [sources, layers, vocab_size].

    Raises:
        InputError: sources and latents both or neither, or other numbers of them than of targets.
    """
    blocks = _blocks(nn_model, layers)
    if (latents is None) == (source_prompts is None):
        raise InputError("give source_prompts or latents, one of the two")
    if latents is None:
        states = _states(nn_model, encode_batch(nn_model, source_prompts, **inputs), blocks, position)
    else:
        states = _checked_latents(nn_model, latents, blocks, inputs)
    targets = _targets(target_patch_prompts, states.shape[1])
    batch = encode_batch(nn_model, [target.prompt for target in targets])
    each = zip(prompt_rows(nn_model, batch), targets, strict=True)
    places = torch.stack([_place(row, target.index_to_patch) for row, target in each])
    rows, recorded = torch.arange(len(targets)), nn_model.record(batch)
    found = []
    for block, state in _shown(list(zip(blocks, states, strict=True)), progress):
        with nn_model.trace(recorded):
            stream = nn_model.layers[block].layer_output
            stream[rows, places] = state.to(stream)
            found.append(nn_model.next_token_probs.cpu())
    return torch.stack(found, 1)


@torch.no_grad()
def patchscope_generate(
    nn_model: StandardizedTransformer,
    prompts: Any,
    target_patch_prompt: TargetPrompt | None = None,
    max_length: int = 50,
    layers: Layers = None,
    max_batch_size: int = 32,
    *,
    position: int = -1,
    progress: bool = True,
    **inputs: Any,
) -> dict[int, torch.Tensor]:
    """What the model writes after a target prompt, greedily, with a state of each source prompt in the
    place of one of its tokens, written into the output of one block.

    Args:
        prompts: the sources.
        target_patch_prompt: `repeat_prompt()` by default.
        max_length: tokens that are generated at most.
        layers: blocks; all by default.
        max_batch_size: sources that are generated for at a time.
        position: the token of each source whose state it is, by default the last.
        inputs: of the sources' trace, such as `images=`.

    Returns:
        For each block the ids [sources, target + generated]. Rows that ended early are filled with the
        pad token.
    """
    if max_batch_size < 1:
        raise InputError(f"max_batch_size is {max_batch_size}; give 1 or more")
    blocks = list(dict.fromkeys(_blocks(nn_model, layers)))
    states = _states(nn_model, encode_batch(nn_model, prompts, **inputs), blocks, position)
    target = target_patch_prompt or repeat_prompt()
    starts = range(0, states.shape[1], max_batch_size)
    parts: dict[int, list[torch.Tensor]] = {block: [] for block in blocks}
    with _bar(len(blocks) * len(starts), progress) as bar:
        for start in starts:
            own = states[:, start : start + max_batch_size]
            batch = encode_batch(nn_model, [target.prompt] * own.shape[1])
            places = _places(nn_model, batch, target.index_to_patch)
            rows, recorded = torch.arange(len(places)), nn_model.record(batch, keys=True)
            for block, state in zip(blocks, own, strict=True):
                with nn_model.generate(recorded, max_new_tokens=max_length) as tracer:
                    stream = nn_model.layers[block].layer_output
                    stream[rows, places] = state.to(stream)
                parts[block].append(tracer.result)
                bar.update()
    return {block: _joined(found, tracer._pad) for block, found in parts.items()}


@torch.no_grad()
def patch_object_attn_lens(
    nn_model: StandardizedTransformer,
    source_prompts: Any,
    target_prompts: Any,
    attn_idx_patch: int,
    num_patches: int = 5,
    *,
    progress: bool = True,
) -> torch.Tensor:
    """The next token's probabilities in target prompts whose attention is given another state to read:
    what enters the attention of `num_patches` blocks at one position is taken from the last token of
    the source prompts. The first of these blocks is each in turn; the last windows are cut off.

    The stream itself is left alone. In a block of linear attention it is what enters that one.

    Args:
        source_prompts: as many as targets, or one for all. With images, give the dict of the arguments.
        attn_idx_patch: the position in the target prompts.

    Returns:
        [targets, layers, vocab_size].
    """
    if num_patches < 1:
        raise InputError(f"num_patches is {num_patches}; give 1 or more")
    blocks = range(nn_model.num_layers)
    batch = encode_batch(nn_model, target_prompts)
    places = _places(nn_model, batch, attn_idx_patch)
    sources = encode_batch(nn_model, source_prompts)
    if len(sources["input_ids"]) not in (1, len(places)):
        raise InputError(
            f"there are {len(sources['input_ids'])} source prompts and {len(places)} target prompts: give one source "
            "for each target, or one for all"
        )
    states = _states(nn_model, sources, blocks, -1, lambda block: _mixer(nn_model, block).input)
    rows, recorded = torch.arange(len(places)), nn_model.record(batch)
    found = []
    for first in _shown(blocks, progress):
        with nn_model.trace(recorded):
            for block in blocks[first : first + num_patches]:
                entering = _mixer(nn_model, block).input
                entering[rows, places] = states[block].to(entering)
            found.append(nn_model.next_token_probs.cpu())
    return torch.stack(found, 1)


def _mixer(model: StandardizedTransformer, block: int) -> Any:
    """The attention of a block, softmax or linear."""
    layer = model.layers[block]
    return layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn


def _blocks(model: StandardizedTransformer, layers: Layers) -> list[int]:
    count = model.num_layers
    if layers is None:
        return list(range(count))
    chosen: Any = [layers] if not hasattr(layers, "__len__") else layers
    if not len(chosen):
        raise InputError(f"layers is empty; give some of the {count} blocks, or None for all")
    return [model._layer_index(layer, count) for layer in chosen]


def _places(model: StandardizedTransformer, batch: Batch, positions: int | Sequence[int]) -> torch.Tensor:
    """The places in the padded rows of positions that count in each prompt: [prompts], or [prompts,
    positions] for several."""
    return torch.stack([_place(row, positions) for row in prompt_rows(model, batch)])


def _place(row: PromptRows, positions: int | Sequence[int]) -> torch.Tensor:
    """Where positions of a prompt lie in its padded row, in their shape."""
    wanted = torch.as_tensor(positions)
    if wanted.dtype != torch.long or wanted.ndim > 1 or not wanted.numel():
        raise InputError(f"position {positions!r}: give an integer, or several")
    count = row.tokens.stop - row.tokens.start
    for position in wanted.reshape(-1).tolist():
        if not -count <= position < count:
            raise InputError(
                f"position {position} of prompt {row.index}: it has {count} tokens, 0 to {count - 1}, or -{count} to -1"
            )
    return row.tokens.start + wanted % count


def _states(
    model: StandardizedTransformer,
    batch: Batch,
    blocks: Sequence[int],
    position: int,
    read: Callable[[int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """[blocks, prompts, hidden_size], a value of each block, by default its output, at one position."""
    places = _places(model, batch, position)
    rows, found = torch.arange(len(places)), {}
    with model.trace(**batch):
        for block in sorted(set(blocks)):
            value = model.layers[block].layer_output if read is None else read(block)
            found[block] = value[rows, places]
    return torch.stack([found[block] for block in blocks])


def _checked_latents(
    model: StandardizedTransformer, latents: torch.Tensor, blocks: Sequence[int], inputs: dict[str, Any]
) -> torch.Tensor:
    for name in inputs:
        raise TypeError(f"{name} belongs to source prompts; latents were given in their place")
    fits = latents.ndim == 3 and len(latents) == len(blocks) and latents.shape[-1] == model.hidden_size
    if not fits:
        raise InputError(
            f"latents are [layers, sources, hidden_size], here [{len(blocks)}, sources, {model.hidden_size}]; these "
            f"are {list(latents.shape)}"
        )
    return latents


def _targets(given: TargetPrompt | Sequence[TargetPrompt] | None, count: int) -> list[TargetPrompt]:
    """A target prompt for each of `count` sources."""
    if given is None or isinstance(given, TargetPrompt):
        return [given or repeat_prompt()] * count
    targets = list(given)
    for target in targets:
        if not isinstance(target, TargetPrompt):
            raise InputError(f"a target is a TargetPrompt(prompt, index_to_patch); got {type(target).__name__}")
    if len(targets) != count:
        raise InputError(f"there are {count} sources and {len(targets)} target prompts: give one for each, or one")
    return targets


def _joined(parts: Sequence[torch.Tensor], pad: int) -> torch.Tensor:
    """Generations of one prompt, the shorter ones filled up with the pad token."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=pad) for part in parts])


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=None if progress else True, leave=False)


def _shown(steps: Sequence[Any], progress: bool) -> Iterable[Any]:
    """The steps, with a progress bar on a terminal."""
    from tqdm import tqdm

    return tqdm(steps, disable=None if progress else True, leave=False)
