"""Prompts whose answers are counted: the probabilities of target words as the next token.

>>> prompt = Prompt.from_strings("The capital of France is", {"right": "Paris", "wrong": ["Rome", "Madrid"]}, model)
>>> run_prompts(model, [prompt])["right"]
tensor([[1.0000]])

A prompt is whatever `model.trace` takes; one with images is the dict of the arguments, `{"prompt":
"What color is this?", "images": [picture]}`. A list of such prompts is a batch, and those with and
without images go together.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import InputError, TokenizationError
from .recording import Recording

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["Prompt", "TokenizationError", "encode_batch", "get_first_tokens", "run_prompts"]

_MEDIA = ("images", "videos")


def get_first_tokens(words: str | Sequence[str], llm_or_tokenizer: Any) -> list[int]:
    """The ids of the tokens that words begin with, as they stand and behind a space; each once.

    A word that brings its own space (`" Paris"`) is taken as it is. A token that is only the space is
    left out.

    >>> get_first_tokens("Paris", model)  # those of "Paris" and of " Paris"
    [652, 642]

    Args:
        words: one or several.
        llm_or_tokenizer: a model, or its tokenizer, or one of transformers'.

    Warns:
        UserWarning: a word is several tokens, and the first of them stands for it and for all else
            that begins with that token.

    Raises:
        TokenizationError: no words, a word without tokens, or a tokenizer that gives a word and the word behind
            a space the same first token.
    """
    tokenizer = getattr(llm_or_tokenizer, "tokenizer", llm_or_tokenizer)
    if not words:
        raise TokenizationError("there are no words: give one or more")
    found: dict[int, None] = {}
    cut: list[str] = []
    for word in [words] if isinstance(words, str) else words:
        for text, ids in _spellings(word, tokenizer):
            found[ids[0]] = None
            if len(ids) > 1:
                cut.append(f"{text!r} by {tokenizer.decode(ids[:1])!r}")
    if cut:
        warnings.warn(
            f"these are several tokens, and are counted by the first, with all else that begins so: {', '.join(cut)}",
            stacklevel=2,
        )
    return list(found)


def _spellings(word: str, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """A word as it stands and behind a space, with its tokens; without a spelling whose first token is a space."""
    texts = [word] if word[:1].isspace() else [word, f" {word}"]
    spelt = [(text, list(tokenizer.encode(text, add_special_tokens=False))) for text in texts]
    if not word.strip() or not all(ids for _, ids in spelt):
        raise TokenizationError(f"{word!r} has no tokens: give a word")
    if len(spelt) == 2 and spelt[0][1][0] == spelt[1][1][0]:
        raise TokenizationError(
            f"{word!r} and {texts[1]!r} begin with one token, {spelt[0][1][0]}: the tokenizer puts a space before "
            "every text. Load it with add_prefix_space=False."
        )
    return [(text, ids) for text, ids in spelt if tokenizer.decode(ids[:1]).strip()]


@dataclasses.dataclass
class Prompt:
    """A prompt, and the words whose probability as its next token is asked for.

    Attributes:
        prompt: what a trace takes, or the dict of its arguments.
        target_tokens: for each target the ids that count for it.
        target_strings: for each target the words that the ids were made of.
    """

    prompt: Any
    target_tokens: dict[str, list[int]]
    target_strings: dict[str, str | list[str]] | None = None

    @classmethod
    def from_strings(
        cls, prompt: Any, target_strings: Mapping[str, str | list[str]] | list[str] | str, tokenizer: Any
    ) -> Prompt:
        """A prompt with the first tokens of its targets' words; see `get_first_tokens`. Words without
        names are one target, "target".

        Warns:
            UserWarning: words of several tokens, and targets that share tokens.
        """
        named = dict(target_strings) if isinstance(target_strings, Mapping) else {"target": target_strings}
        made = cls(prompt, {name: get_first_tokens(words, tokenizer) for name, words in named.items()}, named)
        shared = made._collisions(())
        if shared:
            decode = getattr(tokenizer, "tokenizer", tokenizer).decode
            listed = ", ".join(f"{decode([token])!r} of {' and '.join(names)}" for token, names in shared.items())
            warnings.warn(f"targets share first tokens, which count for each of them: {listed}", stacklevel=2)
        return made

    def has_no_collisions(self, ignore_targets: str | Sequence[str] | None = None) -> bool:
        """Whether no token counts for two targets, those in `ignore_targets` left aside."""
        return not self._collisions([ignore_targets] if isinstance(ignore_targets, str) else ignore_targets or ())

    def _collisions(self, ignored: Sequence[str]) -> dict[int, list[str]]:
        """The tokens that count for several targets, with these."""
        targets: dict[int, list[str]] = {}
        for name, tokens in self.target_tokens.items():
            for token in () if name in ignored else dict.fromkeys(tokens):
                targets.setdefault(token, []).append(name)
        return {token: names for token, names in targets.items() if len(names) > 1}

    def get_target_probs(self, probs: torch.Tensor, layer: int | None = None) -> dict[str, torch.Tensor]:
        """For each target the sum of its tokens' probabilities, on the CPU.

        Args:
            probs: [prompts, layers, vocab_size], as from `logit_lens`.
            layer: an index along the layers; all by default.

        Returns:
            [prompts, layers] each, or [prompts] of one layer.
        """
        _check_probs(probs)
        tokens = {target: list(dict.fromkeys(ids)) for target, ids in self.target_tokens.items()}
        sums = {target: probs[..., ids].sum(-1).cpu() for target, ids in tokens.items()}
        return sums if layer is None else {target: found[:, layer] for target, found in sums.items()}

    @torch.no_grad()
    def run(
        self, nn_model: StandardizedTransformer, get_probs: Callable[[StandardizedTransformer, Any], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The targets' probabilities, [1, layers] each, in what `get_probs(model, prompt)` gives; `logit_lens`
        is such a function."""
        return self.get_target_probs(get_probs(nn_model, self.prompt))


@torch.no_grad()
def run_prompts(
    nn_model: StandardizedTransformer,
    prompts: Sequence[Prompt],
    batch_size: int = 32,
    get_probs_func: Callable[..., torch.Tensor] | None = None,
    func_kwargs: Mapping[str, Any] | None = None,
    *,
    progress: bool = True,
) -> dict[str, torch.Tensor]:
    """The targets' probabilities of many prompts, run in batches.

    Args:
        prompts: all with the same names of targets; their words may differ.
        get_probs_func: called with the model, a list of prompts and `func_kwargs`; gives [prompts,
            layers, vocab_size], as `logit_lens` does. By default the probabilities of the next
            token, as of one layer.

    Returns:
        For each target [prompts, layers], on the CPU.

    Raises:
        InputError: before anything is run, for prompts whose targets have other names.
    """
    from tqdm import tqdm

    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; give 1 or more")
    names = list(prompts[0].target_tokens) if prompts else []
    for index, prompt in enumerate(prompts):
        if set(prompt.target_tokens) != set(names):
            raise InputError(
                f"all prompts need the same targets: the first has {', '.join(names)}, and prompt {index} has "
                f"{', '.join(prompt.target_tokens)}"
            )
    get_probs = get_probs_func or _next_token_probs
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, disable=None if progress else True, leave=False):
        batch = prompts[start : start + batch_size]
        probs = get_probs(nn_model, [prompt.prompt for prompt in batch], **(func_kwargs or {}))
        _check_probs(probs, len(batch))
        for row, prompt in enumerate(batch):
            for name, summed in prompt.get_target_probs(probs[row : row + 1]).items():
                found[name].append(summed)
    return {name: torch.cat(rows) for name, rows in found.items()}


def _next_token_probs(model: StandardizedTransformer, prompts: Sequence[Any]) -> torch.Tensor:
    with model.trace(**encode_batch(model, prompts)):
        return model.next_token_probs[:, None].cpu()


def _check_probs(probs: torch.Tensor, count: int | None = None) -> None:
    if probs.ndim != 3 or count not in (None, len(probs)):
        wanted = "prompts" if count is None else str(count)
        raise InputError(f"probabilities are [{wanted}, layers, vocab_size]; these are {list(probs.shape)}")


def single_token(model: StandardizedTransformer, token: Any, taker: str) -> int:
    """The id of a text that is one token; an id as it is. `taker` is what asks for it, for the message.

    Raises `InputError` for a text of several tokens."""
    if not isinstance(token, str):
        return int(token)
    ids = model.tokenizer.encode(token)
    if len(ids) != 1:
        raise InputError(f"{token!r} is {len(ids)} tokens; {taker} takes single tokens (mind the leading space)")
    return int(ids[0])


def encode_batch(model: StandardizedTransformer, prompts: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """The tensors of a trace of one or several prompts, dicts of arguments among them.

    >>> encode_batch(model, ["The capital of France is", {"prompt": "What color is this?", "images": [picture]}])

    `prompts` and `inputs` are otherwise those of `model.trace`.

    Raises:
        InputError: in a list, a dict with anything but a prompt, images and videos, and images given
            both there and beside the list.
    """
    if isinstance(prompts, Recording):
        prompts = prompts.inputs
    if _is_arguments(prompts):
        return model.encode(**prompts, **inputs)
    if isinstance(prompts, (list, tuple)) and any(map(_is_arguments, prompts)):
        items = [item if _is_arguments(item) else {"prompt": item} for item in prompts]
        inputs = {**_media(items, inputs), **inputs}
        prompts = [item["prompt"] for item in items]
    return model.encode(prompts, **inputs)


def _is_arguments(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "prompt" in prompt


def _media(items: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The images and videos of several dicts of arguments, one list for each."""
    for index, item in enumerate(items):
        for name in item.keys() - {"prompt", *_MEDIA}:
            raise InputError(f"prompt {index} of the list has {name!r}: give it for the whole batch, {name}=...")
        for name in item.keys() & inputs.keys():
            raise InputError(f"{name} are given for prompt {index} and beside the list: give them once")
    given = {name: [item.get(name) or [] for item in items] for name in _MEDIA}
    return {name: lists for name, lists in given.items() if any(map(len, lists))}
