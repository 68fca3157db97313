"""Loading a model, and the methods that act on all of it."""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch

from . import _core
from .edits import Edit, make_edit
from .errors import CheckpointNotFound, ConfigError, InputError
from .generation import GenerationTracer, Sampling
from .index_maps import ImageTokens, PromptRows, prompt_rows
from .placement import check_device, parts_of, placed
from .recording import Recording, Tail
from .trace import InvokeTracer, Session, Tracer
from .tree import CausalLM, ModuleList, Record, plant

__all__ = ["StandardizedTransformer", "load", "weight_counts"]

_TASKS = ("image-text-to-text", "text-generation")
_WEIGHTS = ("resident", "stream")
_STREAMS_ON_CPU = 'weights="stream" runs on the CPU alone'
_TENSORS = frozenset(
    (
        "input_ids",
        "attention_mask",
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
    )
)
#: Part of a processor's encoding, and not needed: positions follow from the ids and the grids.
_IGNORED = ("mm_token_type_ids", "token_type_ids")
#: How a processor takes the frames of `videos=`.
_VIDEO_OPTIONS = ("video_metadata", "fps", "num_frames", "do_sample_frames")
_ELSEWHERE = {
    "remote": "the forward runs in this process",
    "scan": "use model.scan(prompt)",
    "validate": "inputs are always checked",
    "hook": "call a module on a tensor for plain arithmetic",
    "rename": "the short names are always there",
    "envoys": "the values are always there",
    "num_beams": "a generation is one sequence a prompt; give a list of prompts for several",
    "num_return_sequences": "a generation is one sequence a prompt; give a list of the same prompt, and a seed",
    "use_cache": "steps always run over the cache; model.trace(input_ids=ids so far) is a full pass",
    "position_ids": "positions follow from the ids, the attention mask and the grids",
    "inputs_embeds": "assign model.token_embeddings inside the trace",
    "past_key_values": "a generation keeps its own; model.record(prompt, keys=True) keeps one to start from",
    "labels": "compute the loss from model.logits",
    "output_attentions": "read layers[i].self_attn.attention_probabilities",
    "output_hidden_states": "read layers[i].layer_output",
}


def _demo_folder() -> Path:
    """The built-in model, in an installed package or in the repository."""
    here = Path(__file__).resolve().parent
    packaged = here / "demo_model"
    return packaged if packaged.is_dir() else here.parents[1] / "demo" / "model"


def _hub_snapshot(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointNotFound(
            f"{repo_id!r} is no folder here, and the hub did not give it as a model "
            f"({type(error).__name__}: {error}). Give the path of a checkpoint folder, a hub id that "
            'can be reached, or "demo".'
        ) from error


def _check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype, also by its name; None (or "auto") for the stored one."""
    known = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if known is None or known == "auto":
        return None
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise InputError(f"dtype is {dtype!r}; give a floating-point dtype of torch, as in torch.bfloat16")
    return known


def _find(path_or_id: str | os.PathLike[str], revision: str | None) -> Path:
    """The folder of a checkpoint."""
    if isinstance(path_or_id, torch.nn.Module):
        raise TypeError(
            "vlscope runs checkpoints, not modules in memory: call module.save_pretrained(folder) and load the folder"
        )
    if path_or_id == "demo":
        return _demo_folder()
    if not os.fspath(path_or_id):
        raise CheckpointNotFound('the path is empty: give a checkpoint folder, a hub id, or "demo"')
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointNotFound(f"{path} is a file: give the folder that holds it and config.json")
    name = str(path_or_id)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _hub_snapshot(name, revision)
    raise CheckpointNotFound(f"{path} does not exist: give the folder of a checkpoint or a hub id")


def _read_config(folder: Path) -> tuple[str, Path]:
    path = folder / "config.json"
    try:
        return path.read_text(encoding="utf-8"), path
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} does not exist: {folder} is no checkpoint folder") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def _read_generation_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """generation_config.json; in a folder without one, the token ids of config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        text = config.get("text_config", config)
        return {name: text.get(name, config.get(name)) for name in ("eos_token_id", "pad_token_id")}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}; an object is expected")
    return {name: value for name, value in found.items() if value is not None}


class StandardizedTransformer(CausalLM):
    """A Qwen vision-language model whose forward can be read and edited as it runs.

    >>> model = vlscope.load("demo")
    >>> with model.trace("What color is this?", images=[picture]):
    ...     mask = model.vision.image_token_mask.save()
    ...     model.vision.image_features[:] = 0
    ...     logits = model.logits.save()

    Args:
        path_or_id: a checkpoint folder in the hub's format, a hub id, or "demo".
        task: "image-text-to-text", or "text-generation" for a load without a processor, where every
            vision value is `Unavailable`.
        dtype: what the weights are converted to; by default they stay as stored, used in place.
        weights: "resident", or "stream" for a model that is larger than memory: large weights stay as
            stored, mapped, and each is converted to `dtype`, by default float32, when it is used. The bits are
            those of a load with this `dtype`. On the CPU alone.
        device: where the weights live and the forward runs.
        device_map: for several devices, in place of `device`: "auto" divides the blocks by free memory,
            a mapping says where each part lives; see `placement.placed`.
        attn_implementation: "sdpa" or "eager". Patterns can be read and written under both.
        patch_embedding: how the CPU projects patches in float32: "convolution" keeps the reference's bits,
            "matmul" is the equal matrix product, some times as fast and within 1e-5 of it.
        dispatch: False leaves the weights on disk until the first trace.
        processor: used in place of the checkpoint's own, e.g. a transformers processor.
        copy: copies the weights into memory, for folders that may be overwritten while in use.
        revision: of a hub id.

    Raises:
        CheckpointNotFound, CheckpointError, ConfigError, UnsupportedFamily: before any compute.
    """

    __slots__ = (
        "_config",
        "_copy",
        "_core",
        "_dispatched",
        "_dtype",
        "_edits",
        "_entries",
        "_folder",
        "_generation_config",
        "_lock",
        "_own_processor",
        "_parts",
        "_placement",
        "_sites",
        "attn_implementation",
        "config",
        "patch_embedding",
        "processor",
        "repo_id",
        "task",
        "weights",
    )

    def __init__(
        self,
        path_or_id: str | os.PathLike[str],
        *,
        task: str = "image-text-to-text",
        dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, str | torch.device] | None = None,
        attn_implementation: str = "sdpa",
        patch_embedding: str = "convolution",
        dispatch: bool = True,
        processor: Any = None,
        copy: bool = False,
        weights: str = "resident",
        revision: str | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            reason = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise TypeError(f"loading takes no argument {name!r}{reason}")
        if task not in _TASKS:
            raise ValueError(f"task is {task!r}; give {' or '.join(map(repr, _TASKS))}")
        if weights not in _WEIGHTS:
            raise InputError(f"weights is {weights!r}; give {' or '.join(map(repr, _WEIGHTS))}")
        if weights == "stream" and copy:
            raise InputError('weights="stream" leaves the weights in their files, and copy=True is given as well')
        if weights == "stream" and device_map is not None:
            raise InputError(f"{_STREAMS_ON_CPU}, and device_map is given as well")
        folder = _find(path_or_id, revision)
        text, where = _read_config(folder)
        self._dtype = _check_dtype(dtype or torch_dtype) or (torch.float32 if weights == "stream" else None)
        text_only = task == "text-generation"
        core = _core.Model.build(text, str(where), attn_implementation, patch_embedding, text_only, self._dtype)
        self._folder, self._core = folder, core
        self.weights = weights
        self._parts = [] if device_map is None else parts_of(core, self._dtype)
        self._placement = self._devices(device, device_map)
        self._copy = copy
        self._lock = threading.Lock()
        self._dispatched = False
        self._edits: dict[str, Edit] = {}
        self._config = core.config()
        self._entries = core.modules()
        self._sites = core.sites()
        plant(self, self, self._entries, None)
        self.config = MappingProxyType(json.loads(text))
        self._generation_config = _read_generation_config(folder, self.config)
        self.repo_id = str(path_or_id)
        self.task = task
        self.attn_implementation = attn_implementation
        self.patch_embedding = patch_embedding
        self._own_processor = processor
        self.processor = self._light_processor() if task == "image-text-to-text" else None
        if dispatch:
            self.dispatch()

    def _devices(
        self, device: str | torch.device | None, device_map: str | Mapping[str, str | torch.device] | None
    ) -> dict[str, torch.device]:
        if device_map is None:
            return {"": self._checked_device(device or "cpu")}
        if device is not None:
            raise InputError(f"device is {str(device)!r} and device_map is given as well: give one of the two")
        return placed(self._parts, device_map)

    def _checked_device(self, device: str | torch.device) -> torch.device:
        known = check_device(device)
        if self.weights == "stream" and known.type != "cpu":
            raise InputError(f'{_STREAMS_ON_CPU}, and the device is "{known}"')
        return known

    def _weight_places(self) -> dict[str, torch.device]:
        """The device of every weight, by the beginning of its name."""
        by_path = {f"{part.path}.": self._placement[part.name] for part in self._parts if part.name in self._placement}
        return {"": next(iter(self._placement.values())), **by_path}

    def _light_processor(self) -> Any:
        from .processing import Processor

        if self._own_processor is None:
            self._own_processor = Processor.from_folder(self._folder)
        return self._own_processor

    # --- what it is ---

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self._light_processor().tokenizer

    @property
    def family(self) -> str:
        """`model_type` of the checkpoint: "qwen3_vl", "qwen2_5_vl", ..."""
        return self._config["model_type"]

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self._folder

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and so of every value that is not said to have another."""
        return self._core.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live; of several devices, the first that a forward comes to."""
        return torch.device(self._core.device)

    @property
    def device_map(self) -> Mapping[str, torch.device]:
        """The device of each part ("vision", "embed_tokens", "layers.0", ..., "norm", "lm_head"), or of "", all."""
        return MappingProxyType(self._placement)

    def to(self, device: str | torch.device) -> StandardizedTransformer:
        """Move the weights to one device, and return this model. Close its traces before."""
        known = self._checked_device(device)
        with self._lock:
            if self._dispatched:
                self._core.to(known)
            self._placement = {"": known}
        return self

    @property
    def dispatched(self) -> bool:
        """True once the weights are there."""
        return self._dispatched

    def dispatch(self) -> None:
        """Load the weights, if they are not there yet."""
        if self._dispatched:
            return
        with self._lock:
            if self._dispatched:
                return
            options = _core.LoadOptions(dtype=self._dtype, copy=self._copy, stream=self.weights == "stream")
            report = self._core.load(self._folder, options, self._weight_places())
            self._dispatched = True
        if report["unused"]:
            logging.getLogger("vlscope").info(
                "%s: %d tensors are for multi-token prediction, which is not run: %s",
                self._folder,
                len(report["unused"]),
                ", ".join(report["unused"]),
            )
        if report["ignored"]:
            names = ", ".join(report["ignored"])
            logging.getLogger("vlscope").warning(
                "%s: ignored %d tensors that are no part of the model: %s",
                self._folder,
                len(report["ignored"]),
                names,
            )

    # --- running ---

    def trace(self, prompt: Any = ..., **inputs: Any) -> Any:
        """A forward of `prompt`, open inside a `with` block; see `Tracer`.

        `prompt` is a string, chat messages, token ids, a processor's encoding, or a list of these (a
        batch, padded on the left). `images` are PIL images, arrays, tensors or paths; `videos` are
        lists of frames, or arrays [frames, height, width, 3], and go with `video_metadata=[{"fps":
        24}]` and one of `fps=` (frames to take a second), `num_frames=` and
        `do_sample_frames=False`. Instead of a prompt the tensors can be given: `input_ids=,
        attention_mask=, pixel_values=, pixel_values_videos=, image_grid_thw=, video_grid_thw=,
        second_per_grid_ts=`.
        `logits_to_keep=n` computes the logits of the last n positions only.
        Without any input, a block for several forwards: see `InvokeTracer`.

        Raises:
            InputError: for inputs that do not fit the model or each other, before any compute.
        """
        if prompt is ...:
            return self._tracer_for(**inputs) if inputs else InvokeTracer(self)
        return self._tracer_for(prompt, **inputs)

    def record(self, prompt: Any = None, *, keys: bool = False, **inputs: Any) -> Recording:
        """Run `prompt` once and keep what `model.trace(recording)` can start from; see `Recording`.

        Takes what `trace` takes. `keys` also keeps every block's keys and values, so that
        `model.generate(recording)` needs no forward over the prompt.

        >>> clean = model.record("What color is this?", images=[picture])
        >>> for k in range(model.num_layers):
        ...     with model.trace(clean):
        ...         model.layers[k].mlp.mlp_output[:, -1] = 0
        ...         effect = model.next_token_probs.save()
        """
        if "logits_to_keep" in inputs:
            raise TypeError("logits_to_keep is for the traces of a recording: model.trace(recording, logits_to_keep=n)")
        return Recording.of(self, self.encode(prompt, **inputs), keys)

    def generate(
        self,
        prompt: Any = None,
        *,
        max_new_tokens: int = 20,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        **inputs: Any,
    ) -> GenerationTracer:
        """A generation from `prompt`, open inside a `with` block; see `GenerationTracer`.

        >>> with model.generate("What color is this?", images=[picture], max_new_tokens=5) as tracer:
        ...     for step in tracer.iter[:]:
        ...         model.layers[2].layer_output[:, -1] += vector
        >>> tracer.text
        'Red'

        Without a block, `model.generate(prompt).result` (or `.text`) runs it whole. Tokens are chosen
        greedily unless `do_sample`; see `Sampling`. `prompt` and `inputs` are those of `trace`; a
        batch is padded on the left.

        Args:
            max_new_tokens: steps at most.
            eos_token_id: ids that end a row; those of generation_config.json by default, an empty
                list for none.
            temperature, top_k, top_p: with `do_sample`; by default those of generation_config.json,
                else 1.0, 50 and 1.0.

        Raises:
            InputError: what `trace` refuses, and prompts padded on the right.
        """
        count = _count("max_new_tokens", max_new_tokens)
        if isinstance(prompt, Tail):
            raise InputError("a tail cannot be generated from: give its recording, or the prompt")
        if "logits_to_keep" in inputs:
            raise TypeError("generate takes no logits_to_keep: a step computes the logits of its last position")
        unused = [
            name
            for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p))
            if value is not None
        ]
        if unused and not do_sample:
            raise InputError(
                f"{unused[0]} was given without do_sample=True: the likeliest token is taken whatever it is"
            )
        defaults = self._generation_config
        if eos_token_id is None:
            eos_token_id = defaults.get("eos_token_id")
        eos = [] if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
        pad = defaults.get("pad_token_id")
        sampling = Sampling(
            do_sample=do_sample,
            temperature=defaults.get("temperature", 1.0) if temperature is None else temperature,
            top_k=defaults.get("top_k", 50) if top_k is None else top_k,
            top_p=defaults.get("top_p", 1.0) if top_p is None else top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        prepared = self._prepare(prompt, **inputs)
        return GenerationTracer(self, prepared, count, eos, pad if pad is not None else (eos or [0])[0], sampling)

    def _tracer_for(self, prompt: Any = None, *, on_exit: Any = None, **inputs: Any) -> Tracer:
        return Tracer(self, self._prepare(prompt, **inputs), on_exit)

    def __call__(self, prompt: Any = None, **inputs: Any) -> Record:  # type: ignore[override]
        """The plain forward: a record with `.logits` [batch, seq, vocab_size]."""
        if self._edits:
            with self.trace(prompt, **inputs):
                return Record(logits=self.logits)
        prepared = self._prepare(prompt, **inputs)
        self.dispatch()
        return Record(logits=self._core.forward(prepared))

    def _prepare(self, prompt: Any = None, *, logits_to_keep: int = 0, **inputs: Any) -> _core.Inputs:
        """Whatever a trace accepts, as the tensors of one forward."""
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            logits_to_keep = _count("logits_to_keep", logits_to_keep)
        if isinstance(prompt, (Recording, Tail)):
            if inputs:
                raise TypeError(f"a recording holds its own inputs; {', '.join(inputs)} cannot be given with it")
            return prompt._inputs_for(self, logits_to_keep)
        return _core.Inputs(self.encode(prompt, **inputs), logits_to_keep)

    def encode(
        self, prompt: Any = None, *, text: Any = None, images: Any = None, videos: Any = None, **tensors: Any
    ) -> dict[str, torch.Tensor]:
        """The tensors that a trace of this input starts from: `input_ids` [batch, seq], and what goes
        with them. Takes what `trace` takes; give them to `trace` to process the images only once.

        >>> batch = model.encode(["Hello", "What color is this?"], images=[[], [picture]])
        >>> with model.trace(**batch): ...
        """
        if text is not None and prompt is not None:
            raise TypeError("give the prompt once: as the first argument or as text=")
        prompt = text if prompt is None else prompt
        options = {name: tensors.pop(name) for name in _VIDEO_OPTIONS if name in tensors}
        if options and videos is None and not isinstance(prompt, (list, tuple)):
            raise TypeError(f"{', '.join(options)} was given without videos")
        if isinstance(prompt, Mapping) and "input_ids" in prompt and not images and not videos:
            tensors, prompt = {**prompt, **tensors}, None
        if prompt is not None:
            if "input_ids" in tensors:
                raise TypeError("give a prompt or input_ids, not both")
            _refuse_unknown(tensors)
            tensors = {**self._encode(prompt, images, videos, options), **tensors}
        elif images is not None or videos is not None:
            given = "videos" if images is None else "images"
            raise InputError(f"{given} were given without a prompt: give the prompt too")
        elif tensors.get("input_ids") is None:
            _refuse_unknown(tensors)
            raise InputError("there is no prompt: give a prompt or input_ids")
        if not tensors.keys() <= _TENSORS:
            _refuse_unknown(tensors)
            tensors = {name: tensors[name] for name in _TENSORS & tensors.keys()}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                tensors[name] = _as_tensor(name, value)
        return tensors

    def _encode(self, prompt: Any, images: Any, videos: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if (images is not None or videos is not None) and self.task == "text-generation":
            given = "videos" if images is None else "images"
            raise InputError(
                f'{given} were given to a model loaded with task="text-generation". Load it with '
                'task="image-text-to-text".'
            )
        processor = self._light_processor()
        if hasattr(processor, "encode_prompt"):
            return processor.encode_prompt(prompt, images, videos, **options)
        return processor(text=prompt, images=images, videos=videos, return_tensors="pt", **options)

    def prompt_rows(self, prompt: Any = None, **inputs: Any) -> list[PromptRows]:
        """Where each prompt of a batch lies in the values of the whole: its unpadded positions, its
        images and videos, its rows of their features. Takes what `trace` takes.

        >>> batch = model.encode(["Hello", "What color is this?"], images=[[], [picture]])
        >>> [row.tokens for row in model.prompt_rows(**batch)]
        [slice(23, 24, None), slice(0, 24, None)]
        """
        return prompt_rows(self, self.encode(prompt, **inputs))

    def image_tokens(self, prompt: Any = None, **inputs: Any) -> list[ImageTokens]:
        """The images of an input in order, each with its grid, its tokens in the prompt, its rows of
        `image_features` and of the vision stream, and the maps between them and the pixels. Takes
        what `trace` takes.

        >>> image, = model.image_tokens("What color is this?", images=[picture])
        >>> image.grid, image.span, image.box(image.token_at(0, 1))
        ((1, 6, 6), slice(4, 13, None), (32, 0, 64, 32))
        """
        return [image for row in self.prompt_rows(prompt, **inputs) for image in row.images]

    def video_tokens(self, prompt: Any = None, **inputs: Any) -> list[ImageTokens]:
        """The videos of an input in order, as `image_tokens` gives the images. A frame of the grid is
        a temporal patch, `temporal_patch_size` frames of the video."""
        return [video for row in self.prompt_rows(prompt, **inputs) for video in row.videos]

    def scan(self, prompt: Any = None, **inputs: Any) -> dict[str, Any]:
        """Shape and dtype of every value that a forward of this input reaches, as empty tensors on
        the "meta" device, by site; a tuple of them where the value is one. Needs no weights and
        computes nothing. Takes what `trace` takes.

        >>> model.scan("Hello")["layers.0.self_attn.attention_queries"].shape
        torch.Size([1, 4, 1, 32])
        """
        prepared = self._prepare(prompt, **inputs)
        offered: dict[int | None, dict[int, torch.Tensor]] = {}
        for order, slot, shape, dtype in self._core.scan(prepared):
            offered.setdefault(order, {})[slot] = torch.empty(shape, dtype=dtype, device="meta")
        found: dict[str, Any] = {}
        for index, place in enumerate(self._sites):
            here = offered.get(self._core.order_of(index), {})
            value = here.get(place.slot)
            if value is None or place.unavailable:
                continue
            if place.list:
                found.setdefault(place.path, tuple(part for slot, part in here.items() if slot >= place.slot))
                continue
            if place.images_axis:
                value = value[None]
            elif place.batch_axis:
                value = value.view(len(prepared.input_ids), -1, *value.shape[1:])
            found.setdefault(place.path, value)
        return found

    # --- what stands in every trace ---

    def edit(self, sites: str | Iterable[str], function: Callable[[Any], Any], *, key: str | None = None) -> Edit:
        """Apply `function` to a value in every trace from now on.

        `function` takes the value and edits it in place, or returns what takes its place. `sites` are
        one or more patterns, as in `layers.2.layer_output` or `vision.layers.*.layer_output`. Within a
        trace the edit is made when the forward comes by, before the script sees anything from there
        on; in a generation, on every step. What a forward does not reach is passed over. An edit under
        the `key` of another (by default its sites) replaces it. As a context manager it lasts for the
        block:

        >>> with model.edit("vision.image_features", torch.zero_):
        ...     blind = model("What color is this?", images=[picture]).logits

        Raises:
            UnknownSite, Unavailable, InputError: for sites that are not there or cannot be edited.
        """
        made = make_edit(self, sites, function, key)
        self._edits[made.key] = made
        return made

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that are made in every trace, in the order of their making."""
        return tuple(self._edits.values())

    def clear_edits(self, key: str | None = None) -> None:
        """Take back the edit under `key`; every edit by default. Raises `KeyError` for a key that is not there."""
        if key is None:
            self._edits.clear()
        elif key in self._edits:
            del self._edits[key]
        else:
            raise KeyError(f"no edit has the key {key!r}; there are {', '.join(self._edits) or 'none'}")

    def session(self) -> Session:
        """A block around several traces; see `Session`."""
        return Session()

    # --- the values as a whole ---

    @property
    def input_size(self) -> torch.Size:
        """Shape of `input_ids` in the open trace: (batch, seq). Read-only: assign `input_ids`."""
        return self.input_ids.shape

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """What can be read: `{value name: None}`, or a reason why not.

        Values of the blocks are listed once; where only some blocks lack one, as `{layer: reason}`.
        Vision values are prefixed with `vision.`. With `layer=i`, the values of that text block
        alone, `{name: None or reason}`. A text-only load leaves the vision values out.
        """
        if layer is not None:
            return _flat_support(self.layers[layer])
        rows: dict[str, Any] = dict(super().support())
        blocks = _list_support(self.layers)
        if self.task == "text-generation":
            del blocks["deepstack_output"]
        rows.update(blocks)
        if self.task == "image-text-to-text":
            rows.update({f"vision.{name}": reason for name, reason in self.vision.support().items()})
            blocks = _list_support(self.vision.layers)
            rows.update({f"vision.{name}": reason for name, reason in blocks.items()})
        return rows

    def order(self, sites: str | Sequence[str] | None = None) -> Any:
        """Every location of the forward in its order, or the place of sites in it.

        One site gives its number; a pattern or a list gives `{site: number}` in forward order. Sites
        with one number share a location, and can be read in any order. None for a value that is not
        served. The grammar of patterns is that of `vlscope.sites`.

        >>> model.order()[:3]
        ['input', 'model.input', 'vision.image_token_mask']
        >>> model.order("layers.0.layer_output") < model.order("layers.-1.layer_output")
        True
        >>> list(model.order(["logits", "layers.:2.layer_output"]))
        ['layers.0.layer_output', 'layers.1.layer_output', 'logits']
        """
        from .sites import expand, is_pattern, number

        if sites is None:
            return self._core.locations()
        if isinstance(sites, str) and not is_pattern(sites):
            return self._core.order_of(number(self, sites))
        return {site: self._core.order_of(number(self, site)) for site in expand(self, sites)}

    def rank(self, name: str, layer: int | None = None) -> Any:
        """Place of a value within its block: 0 for its input; a smaller rank is served earlier, an
        equal one at the same location; None if it is not served. The block is the first that has the value.

        With `layer`, the place in the whole forward, to compare with others: `(layer, rank)`, the
        layer counted from the front. A value of the whole model ranks among those, `(-1, rank)` if
        it comes before the blocks and `(num_layers, rank)` if after, whatever `layer` says.

        >>> model.rank("attention_queries"), model.rank("attention_values"), model.rank("layer_output")
        (1, 1, 7)
        >>> model.rank("layer_output", 0) < model.rank("attention_queries", -1) < model.rank("logits", 0)
        True
        """
        first = 0 if layer is None else self._layer_index(layer, self.num_layers)
        blocks = list(enumerate(self.layers))[first : None if layer is None else first + 1]
        hosts_by_index = [(index, [block, *block._children.values()]) for index, block in blocks]
        for index, hosts in (*hosts_by_index, (-1, [self])):
            orders = self._value_orders(hosts)
            if name not in orders:
                continue
            order = orders[name]
            if order is None:
                return None
            rank = sorted({known for known in orders.values() if known is not None}).index(order)
            if layer is None:
                return rank
            if hosts[0] is self:
                index = -1 if order < self.order("layers.0.input") else self.num_layers
            return index, rank
        raise KeyError(f"no value {name!r}; model.support() lists them")

    def _value_orders(self, hosts: Sequence[Any]) -> dict[str, int | None]:
        """The named values of some modules, and the numbers of their locations."""
        return {
            value.name: self._core.order_of(host._values + offset)
            for host in hosts
            for offset, value in enumerate(host._kind.values)
        }

    # --- acting on values ---

    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head on a stream [..., hidden_size]: logits [..., vocab_size]. On the last
        block's `layer_output` these are the model's logits."""
        self.dispatch()
        return self._core.project_on_vocab(hidden)

    def steer(
        self,
        layers: int | Sequence[int],
        vector: torch.Tensor,
        factor: float = 1.0,
        token_positions: Any = None,
        batch_index: Any = None,
    ) -> None:
        """Add `factor * vector` to the output of `layers`, in place, in ascending order.

        Args:
            vector: [hidden_size], or anything that broadcasts; cast to the stream's dtype and device.
            token_positions: index, slice or list along the tokens; all by default.
            batch_index: index, slice or list along the prompts; all by default.
        """
        indices: Any = [layers] if np.ndim(layers) == 0 else layers
        count = self.num_layers
        rows = slice(None) if batch_index is None else batch_index
        tokens = slice(None) if token_positions is None else token_positions
        for index in sorted(self._layer_index(index, count) for index in indices):
            stream = self.layers[index].layer_output
            stream[rows, tokens] += factor * vector.to(stream)

    def _layer_index(self, index: Any, count: int) -> int:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"layer {index!r}: give the number of a block, 0 to {count - 1}")
        index = operator.index(index)
        if not -count <= index < count:
            raise IndexError(f"layer {index}: the model has {count}, 0 to {count - 1}")
        return index % count

    def skip_layer(self, layer: int, skip_with: torch.Tensor | None = None) -> None:
        """Leave a text block out: its output is `skip_with`, by default its input."""
        self.skip_layers(layer, layer, skip_with)

    def skip_layers(self, first: int, last: int, skip_with: torch.Tensor | None = None) -> None:
        """Leave the text blocks `first` to `last` (inclusive) out. What enters the block after them
        is `skip_with`, by default what enters the first."""
        count = self.num_layers
        first, last = self._layer_index(first, count), self._layer_index(last, count)
        if first > last:
            raise ValueError(f"skip_layers({first}, {last}): the first comes after the last")
        value = self.layers[first].input if skip_with is None else skip_with
        for index in range(first, last + 1):
            self.layers[index].skip(value)

    def get_topk_closest_tokens(self, hidden: torch.Tensor, k: int = 10) -> list[dict[str, float]]:
        """For each row of a stream [..., hidden_size], its k likeliest tokens and probabilities."""
        probs = self.project_on_vocab(hidden).softmax(-1)
        return [self.probs_to_dict(row, k) for row in probs.reshape(-1, probs.shape[-1])]

    def probs_to_dict(self, probs: torch.Tensor, k: int = 10) -> dict[str, float]:
        """The k likeliest tokens of probabilities [vocab_size], likeliest first. Tokens whose texts
        collide are keyed by their form in the vocabulary."""
        top = probs.topk(min(k, probs.numel()))
        texts = [self.tokenizer.decode([token]) for token in top.indices.tolist()]
        raw = self.tokenizer.convert_ids_to_tokens(top.indices.tolist())
        keys = [text if texts.count(text) == 1 else form for text, form in zip(texts, raw, strict=True)]
        return dict(zip(keys, top.values.tolist(), strict=True))

    def __repr__(self) -> str:
        from .printing import model_text

        return model_text(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a StandardizedTransformer holds mapped weights and cannot be copied or pickled: load it "
            f"again by vlscope.load({self.repo_id!r})"
        )


def _refuse_unknown(names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        if name in _TENSORS or name in _IGNORED or value is None:
            continue
        reason = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise TypeError(f"a trace takes no argument {name!r}{reason}")


def _count(name: str, value: Any) -> int:
    """A number of things, 1 or more."""
    try:
        count = operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}; give an integer") from None
    if count < 1 or isinstance(value, bool):
        raise InputError(f"{name} is {value}; give 1 or more")
    return count


def _as_tensor(name: str, value: Any) -> torch.Tensor | None:
    if value is None or isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} is no tensor and cannot be made one: {error}") from None


def _flat_support(block: Any) -> dict[str, str | None]:
    rows: dict[str, str | None] = dict(block.support())
    for child in block._children.values():
        rows.update(child.support())
    return rows


def _list_support(blocks: ModuleList[Any]) -> dict[str, Any]:
    """The support of many blocks, as one row a value that any of them has."""
    each = [_flat_support(block) for block in blocks]
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in each for name in row):
        reasons = [row[name] if name in row else _lack(block, name) for row, block in zip(each, blocks, strict=True)]
        rows[name] = {i: reason for i, reason in enumerate(reasons) if reason is not None} or None
    return rows


def _lack(block: Any, name: str) -> str:
    """Why a block lacks a value that others of its list have."""
    return next(iter(block._absent.values()), f"a block of another kind, without {name}")


def load(path_or_id: str | os.PathLike[str], **options: Any) -> StandardizedTransformer:
    """Open a model: a checkpoint folder, a hub id, or "demo", the built-in one.

    Takes the options of `StandardizedTransformer`.

    >>> model = vlscope.load("Qwen/Qwen3-VL-4B-Instruct", dtype=torch.float32)
    """
    return StandardizedTransformer(path_or_id, **options)


def weight_counts(config: str | os.PathLike[str]) -> tuple[int, int]:
    """Tensors and parameters that a checkpoint of this `config.json` stores, without any weights."""
    path = Path(config)
    core = _core.Model.build(path.read_text(encoding="utf-8"), str(path), "sdpa", "convolution", False)
    return core.count_weights()
