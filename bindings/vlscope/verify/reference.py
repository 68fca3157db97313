"""Runs transformers' own model and records every named value and every module call, in the order they happen.

The names are those of vlscope: `layers.3.self_attn.attention_queries`, `vision.tower_output`; a module is known by its
native path (`model.language_model.layers.3.self_attn.q_proj`). Forward hooks sit on every module; the attention
functions are wrapped, because queries, scores and patterns are no module's input or output.

`edits={name: function}` changes a value on its way, so that a write through vlscope can be compared with the same write
through a hook. A function gets the tensor and returns the one to go on with.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText
from transformers.integrations.moe import ExpertsInterface

TEXT, VISION = "model.language_model", "model.visual"
TEXT_ATTENTION = rf"{TEXT}\.layers\.\d+\.self_attn"
DELTA_NET = rf"{TEXT}\.layers\.\d+\.linear_attn"
MIXTURE = rf"{TEXT}\.layers\.\d+\.mlp"
VISION_ATTENTION = rf"{VISION}\.blocks\.\d+\.attn"


@dataclass
class Call:
    """One call of a module: what went in and what came out, by reference."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@dataclass
class Run:
    """What one forward of transformers did.

    values  named value -> tensor
    calls   native module path -> Call
    order   named values, `<path>.inputs` and `<path>.output`, as the forward comes by them
    """

    values: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @property
    def logits(self) -> torch.Tensor:
        return self.values["logits"]


def load(folder: str | PathLike[str], attn_implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint folder, for inference."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=attn_implementation, dtype=dtype)
    return model.eval().requires_grad_(False)


def complete(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Adds what transformers wants and vlscope derives: token types, and a text's positions by the attention mask.

    With images or videos transformers makes the same positions itself. Its plain text-only forward counts padding, and
    hands every block a second form of the positions that none of them reads.
    """
    ids = inputs["input_ids"]
    types = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    completed = {**inputs, "mm_token_type_ids": types, "use_cache": False}
    if "image_grid_thw" not in inputs and "video_grid_thw" not in inputs:
        completed["position_ids"], _ = model.model.get_rope_index(ids, types, attention_mask=inputs["attention_mask"])
    return completed


def plain(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of an unwatched forward, called as a user calls it; only a padded text is given positions."""
    completed = complete(model, inputs)
    if inputs["attention_mask"].all():
        completed.pop("position_ids", None)
    with torch.no_grad():
        return model(**completed).logits


def run(
    model: Any,
    inputs: dict[str, torch.Tensor],
    edits: dict[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    grad: bool = False,
) -> Run:
    """One watched forward; with `grad`, one that records a graph for what requires it.

    transformers runs its tower once for the images of a prompt and once more for its videos. Here it runs once on both,
    images first, as vlscope does: the last bits of a row of a matrix product depend on how many rows there are.
    """
    model.model.rope_deltas = None
    recorder = _Recorder(model, edits or {}, inputs)
    recorder.named("input_ids", inputs["input_ids"])
    recorder.named("attention_mask", inputs["attention_mask"])
    with torch.set_grad_enabled(grad), recorder.watching():
        model(**complete(model, inputs))
    recorder.finish(inputs["attention_mask"])
    unused = set(edits or {}) - recorder.edited
    assert not unused, f"edits that met no value: {sorted(unused)}"
    return recorder.run


def additive_mask(attention_mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The causal mask of eager attention, [batch, 1, query, key]: 0 where allowed, the dtype's minimum elsewhere."""
    length = attention_mask.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
    return torch.where(allowed, torch.tensor(0.0, dtype=dtype), torch.finfo(dtype).min)


def standard(path: str) -> str:
    """The name under which vlscope's tree also has the module at a native path: `vision.layers.0.self_attn`."""
    rules = (
        (r"^model\.language_model\.(layers|embed_tokens|norm)\b", r"\1"),
        (r"^model\.visual\.merger\b", "projector"),
        (r"^model\.visual\.blocks\.(\d+)\.attn\b", r"vision.layers.\1.self_attn"),
        (r"^model\.visual\.blocks\b", "vision.layers"),
        (r"^model\.visual\b", "vision"),
    )
    for pattern, replacement in rules:
        path = re.sub(pattern, replacement, path)
    return path


def reading_list(run: Run) -> Iterator[tuple[str, str]]:
    """(site to read, name in the reference), in forward order; modules under both of their paths."""
    for name in run.order:
        path, _, side = name.rpartition(".")
        if name in run.values:
            yield name, name
        elif path and side == "inputs":
            yield from ((f"{at}.{part}", f"{path}.{part}") for at in paths(path) for part in ("inputs", "input"))
        elif path:
            yield from ((f"{at}.output", name) for at in paths(path))


def paths(native: str) -> dict[str, None]:
    return dict.fromkeys((native, standard(native)))


# Which named value is a module's input or output: native path pattern -> (side, name, leading axis of one).
_AT_MODULES = [
    (rf"{TEXT}\.embed_tokens", "output", "token_embeddings", False),
    (rf"{TEXT}\.layers\.(\d+)", "input", r"layers.\1.layer_input", False),
    (rf"{TEXT}\.layers\.(\d+)", "output", r"layers.\1.layer_output", False),
    (rf"{TEXT}\.layers\.(\d+)\.self_attn", "output", r"layers.\1.self_attn.attention_output", False),
    (rf"{TEXT}\.layers\.(\d+)\.linear_attn", "output", r"layers.\1.linear_attn.attention_output", False),
    (rf"{TEXT}\.layers\.(\d+)\.mlp", "output", r"layers.\1.mlp.mlp_output", False),
    (rf"{VISION}\.patch_embed", "output", "vision.patch_embeddings", True),
    (rf"{VISION}\.blocks\.(\d+)", "input", r"vision.layers.\1.layer_input", True),
    (rf"{VISION}\.blocks\.(\d+)", "output", r"vision.layers.\1.layer_output", True),
    (rf"{VISION}\.blocks\.(\d+)\.attn", "output", r"vision.layers.\1.self_attn.attention_output", True),
    (rf"{VISION}\.blocks\.(\d+)\.mlp", "output", r"vision.layers.\1.mlp.mlp_output", True),
    (rf"{VISION}\.merger", "input", "projector.input", False),
    (rf"{VISION}\.merger", "output", "projector.output", False),
    ("lm_head", "output", "logits", False),
]


def _names_at(path: str, side: str) -> Iterator[tuple[str, bool]]:
    for pattern, at, name, leading in _AT_MODULES:
        match = re.fullmatch(pattern, path)
        if match and at == side:
            yield match.expand(name), leading


_VISUAL = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


class _Recorder:
    def __init__(self, model, edits, inputs):
        self.model, self.edits, self.edited = model, edits, set()
        self.modeling = inspect.getmodule(type(model))  # the family's own modeling_*.py, whose functions are wrapped
        self.visual = [(inputs[pixels], inputs[grid]) for pixels, grid in _VISUAL if pixels in inputs]
        self.pass_over_both = None
        self.batch = len(inputs["input_ids"])
        self.run = Run()
        self.paths = {module: path for path, module in model.named_modules()}
        self.attending = None  # the attention module whose forward runs
        self.segments = {}  # vision attention site -> [(q, k, v)], one per image
        self.taps = None

    @contextmanager
    def watching(self):
        with ExitStack() as stack:
            for module in self.paths:
                stack.callback(module.register_forward_pre_hook(self.before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self.after, with_kwargs=True).remove)
            modeling = self.modeling
            functions = modeling.ALL_ATTENTION_FUNCTIONS
            for target, name, wrapper in (
                (modeling, "eager_attention_forward", self.attention(modeling.eager_attention_forward)),
                (modeling, "apply_rotary_pos_emb_vision", self.rotary(modeling.apply_rotary_pos_emb_vision)),
                (self.model.model, "get_image_features", self.features("image")),
                (self.model.model, "get_video_features", self.features("video")),
            ):
                stack.enter_context(mock.patch.object(target, name, wrapper))
            if hasattr(modeling, "torch_chunk_gated_delta_rule"):
                wrapper = self.delta_rule(modeling.torch_chunk_gated_delta_rule)
                stack.enter_context(mock.patch.object(modeling, "torch_chunk_gated_delta_rule", wrapper))
            experts = {"grouped_mm": self.slots(ExpertsInterface._global_mapping["grouped_mm"])}
            stack.enter_context(mock.patch.dict(ExpertsInterface._global_mapping, experts))
            stack.enter_context(mock.patch.object(functional, "linear", self.linear(functional.linear)))
            stack.enter_context(mock.patch.object(functional, "sigmoid", self.sigmoid(functional.sigmoid)))
            sdpa = self.attention(functions["sdpa"])
            stack.enter_context(mock.patch.object(functions, "_local_mapping", {"sdpa": sdpa}))
            yield

    def named(self, name, tensor):
        """Passes a named value by: notes the order, applies an edit, keeps the value."""
        self.run.order.append(name)
        if name in self.edits:
            tensor = self.edits[name](tensor.clone())
            self.edited.add(name)
        self.run.values[name] = tensor
        return tensor

    def named_part(self, name, tensor):
        """The next element of a value that is a tuple, one for each image; an edit is applied to each."""
        if name not in self.run.values:
            self.run.order.append(name)
        if name in self.edits:
            tensor = self.edits[name](tensor.clone())
            self.edited.add(name)
        self.run.values[name] = (*self.run.values.get(name, ()), tensor)
        return tensor

    def at(self, path, side, tensor):
        """The named values and native edits that live at one side of a module."""
        key = f"{path}.{side}"
        if key in self.edits:
            tensor = self.edits[key](tensor.clone())
            self.edited.add(key)
        for name, leading in _names_at(path, side):
            tensor = self.named(name, tensor[None])[0] if leading else self.named(name, tensor)
        return tensor

    def before(self, module, args, kwargs):
        path = self.paths[module]
        assert path not in self.run.calls, f"{path} is called twice"
        args, kwargs = list(args), dict(kwargs)
        if re.search(r"(o_proj|attn\.proj)$", path) and not self.gated(self.attending):
            args[0] = self.heads(args[0])
        self.run.order.append(f"{path}.inputs")
        if path == "model":
            image_mask = kwargs["input_ids"] == self.model.config.image_token_id
            video_mask = kwargs["input_ids"] == self.model.config.video_token_id
            self.named("vision.image_token_mask", image_mask)
            self.named("vision.video_token_mask", video_mask)
            self.named("vision.visual_token_mask", image_mask | video_mask)
        if path == TEXT and kwargs.get("deepstack_visual_embeds") is not None:
            kwargs["deepstack_visual_embeds"] = self.deepstack(kwargs["deepstack_visual_embeds"])
        if re.fullmatch(f"{TEXT_ATTENTION}|{VISION_ATTENTION}|{DELTA_NET}", path):
            self.attending = path
        if args and isinstance(args[0], torch.Tensor):
            args[0] = self.at(path, "input", args[0])
        elif isinstance(kwargs.get("hidden_states"), torch.Tensor):
            kwargs["hidden_states"] = self.at(path, "input", kwargs["hidden_states"])
        self.run.calls[path] = Call(tuple(args), kwargs)
        return tuple(args), kwargs

    def after(self, module, args, kwargs, output):
        path = self.paths[module]
        self.run.order.append(f"{path}.output" if path else "output")
        if path.endswith("attn.qkv"):
            output = self.vision_values(output)
        if isinstance(output, torch.Tensor):
            output = self.at(path, "output", output)
            if re.fullmatch(rf"{MIXTURE}\.experts", path):
                output = self.of_tokens(path, "routed_output", output)
        elif re.fullmatch(TEXT_ATTENTION, path):
            output = (self.at(path, "output", output[0]), output[1])
        elif re.fullmatch(rf"{MIXTURE}\.gate", path):
            weights, indices = (
                self.of_tokens(path, name, x)
                for name, x in zip(("expert_weights", "expert_indices"), output[1:], strict=True)
            )
            output = (output[0], weights, indices)
        elif path == VISION:
            output.last_hidden_state = self.named("vision.tower_output", output.last_hidden_state[None])[0]
        self.run.calls[path].output = _frozen(output)
        layer = re.fullmatch(rf"{TEXT}\.layers\.(\d+)", path)
        if layer and self.taps is not None and int(layer[1]) < len(self.taps):
            self.run.order.append(f"layers.{layer[1]}.deepstack_output")
        return output

    def of_tokens(self, path, name, tensor):
        """A value of a mixture, whose modules work on the tokens of all prompts in one row."""
        site = f"{standard(path.rpartition('.')[0])}.{name}"
        return self.named(site, tensor.unflatten(0, (self.batch, -1))).flatten(0, 1)

    def linear(self, original):
        """The scores of a router come from a call of the function in the midst of its forward."""
        routers = {id(m.weight): path for m, path in self.paths.items() if re.fullmatch(rf"{MIXTURE}\.gate", path)}

        def linear(x, weight, bias=None):
            output = original(x, weight, bias)
            return self.of_tokens(routers[id(weight)], "router_logits", output) if id(weight) in routers else output

        return linear

    def sigmoid(self, original):
        """The gate of a shared expert, whose product with the expert's output is no module's."""

        class Gate:
            def __init__(self, gate, site):
                self.gate, self.site = gate, site

            def __mul__(gate, shared):  # noqa: N805 - the recorder is `self`
                return self.of_tokens(gate.site, "shared_expert_output", gate.gate * shared)

        def sigmoid(x):
            site, call = next(reversed(self.run.calls.items()))
            assert site.endswith(".mlp.shared_expert_gate") and call.output is x
            return Gate(original(x), site)

        return sigmoid

    def slots(self, original):
        """Each slot is a token of its own with one expert: the same products, and then their sum."""

        def forward(module, x, indices, weights):
            top_k = indices.shape[1]
            alone = original(module, x.repeat_interleave(top_k, 0), indices.reshape(-1, 1), weights.reshape(-1, 1))
            outputs = self.of_tokens(self.paths[module], "expert_outputs", alone.unflatten(0, (-1, top_k)))
            return outputs.sum(dim=1)

        return forward

    def deepstack(self, features):
        """DeepStack features are made in the tower and added, one per block, by the text model."""
        used = min(len(features), len(self.model.model.language_model.layers))
        self.taps = features[:used]
        edited = list(features)
        for k in range(used):
            edited[k] = self.named(f"layers.{k}.deepstack_output", features[k])
            self.run.order.pop()  # the add, where the value is served, comes after block k
        return edited

    def features(self, kind):
        original = self.model.model.get_image_features  # get_video_features is the same under another name

        def get_features(pixels, grid_thw, **kwargs):
            if len(self.visual) == 2:
                output = self.part_of_both(kind, original, kwargs)
            else:
                output = original(pixels, grid_thw, **kwargs)
            sizes = [len(part) for part in output.pooler_output]
            whole = self.named(f"vision.{kind}_features", torch.cat(output.pooler_output))
            output.pooler_output = whole.split(sizes)
            return output

        return get_features

    def part_of_both(self, kind, original, kwargs):
        """The images' or the videos' part of one pass of the tower over both."""
        if self.pass_over_both is None:
            pixels, grids = zip(*self.visual, strict=True)
            self.pass_over_both = original(torch.cat(pixels), torch.cat(grids), **kwargs)
        whole, images = self.pass_over_both, len(self.visual[0][1])
        rows = sum(len(part) for part in whole.pooler_output[:images])
        files, rows = (slice(images), slice(rows)) if kind == "image" else (slice(images, None), slice(rows, None))
        part = {"last_hidden_state": whole.last_hidden_state, "pooler_output": whole.pooler_output[files]}
        if "deepstack_features" in whole:
            part["deepstack_features"] = [level[rows] for level in whole.deepstack_features]
        return type(whole)(**part)

    def site(self):
        return standard(self.attending)

    def heads(self, flat):
        """[..., heads * head_dim] entering the output projection is [batch, seq, heads, head_dim]."""
        attention = self.model.get_submodule(self.attending)
        shape = flat.shape if flat.ndim == 3 else (1, *flat.shape)
        heads = flat.reshape(*shape[:2], -1, attention.head_dim)
        return self.named(f"{self.site()}.attention_head_outputs", heads).reshape(flat.shape)

    def vision_values(self, qkv):
        """Vision values are a third of the fused projection: [patches, 3, heads, head_dim]."""
        name = f"{self.site()}.attention_values"
        if name not in self.edits:
            return qkv
        heads = self.model.get_submodule(self.attending).num_heads
        parts = qkv.reshape(len(qkv), 3, heads, -1).clone()
        parts[:, 2] = self.edits[name](parts[:, 2].transpose(0, 1)[None].clone())[0].transpose(0, 1)
        self.edited.add(name)
        return parts.reshape(qkv.shape)

    def rotary(self, original):
        def apply_rotary_pos_emb_vision(*args):
            rotated = []
            for name, x in zip(("queries", "keys"), original(*args), strict=True):
                site = f"{self.site()}.attention_{name}"
                if site in self.edits:
                    x = self.edits[site](x.transpose(0, 1)[None].clone())[0].transpose(0, 1)
                    self.edited.add(site)
                rotated.append(x)
            return tuple(rotated)

        return apply_rotary_pos_emb_vision

    def attention(self, original):
        def forward(module, query, key, value, attention_mask, scaling, **kwargs):
            if re.fullmatch(VISION_ATTENTION, self.paths[module]):
                return self.vision_attention(original, module, query, key, value, scaling, kwargs)
            site = self.site()
            query = self.named(f"{site}.attention_queries", query)
            key = self.named(f"{site}.attention_keys", key)
            value = self.named(f"{site}.attention_values", value)
            groups = module.num_key_value_groups
            scores = torch.matmul(query, self.modeling.repeat_kv(key, groups).transpose(2, 3)) * scaling
            scores = self.named(f"{site}.attention_scores", scores + self.mask(attention_mask, query))
            pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            pattern = self.named(f"{site}.attention_probabilities", pattern)
            output = original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            if {f"{site}.attention_scores", f"{site}.attention_probabilities"} & self.edited:
                heads = torch.matmul(pattern, self.modeling.repeat_kv(value, groups)).transpose(1, 2).contiguous()
                output = heads, (pattern if output[1] is not None else None)
            if self.gated(self.attending):
                output = self.named(f"{site}.attention_head_outputs", output[0]), output[1]
            return output

        return forward

    def gated(self, path):
        """Whether an attention's heads pass a gate on their way to the output projection."""
        attention = self.model.get_submodule(path)
        return hasattr(attention, "o_proj") and attention.q_proj.out_features > attention.o_proj.in_features

    def unit(self, x):
        return self.modeling.l2norm(x.to(torch.float32, memory_format=torch.contiguous_format))

    def delta_rule(self, original):
        """The recurrence of a prompt, with the state behind each token made by the form for single tokens."""
        by_token = self.modeling.torch_recurrent_gated_delta_rule

        def forward(query, key, value, g, beta, initial_state, output_final_state, **kwargs):
            site = self.site()
            assert initial_state is None
            names = ("attention_queries", "attention_keys", "attention_values", "decays", "betas")
            parts = [
                self.named(f"{site}.{name}", x) for name, x in zip(names, (query, key, value, g, beta), strict=True)
            ]
            (batch, length, heads, width), dim = parts[2].shape, parts[1].shape[-1]
            state = self.named(f"{site}.state", torch.zeros(batch, heads, dim, width))
            # Scaled all at once, as in one run over all tokens: the last bits depend on strides.
            unit = [self.unit(x.transpose(1, 2)).transpose(1, 2) for x in parts[:2]]
            states = [state]
            for t in range(length):
                token = (x[:, t : t + 1] for x in (*unit, *parts[2:]))
                states += by_token(*token, initial_state=states[-1], output_final_state=True)[1:]
            states = self.named(f"{site}.states", torch.stack(states[1:], dim=1))
            outputs, last = original(*parts, initial_state=state, output_final_state=True, **kwargs)
            if f"{site}.states" in self.edited:
                outputs, last = (states * (unit[0] / dim**0.5)[..., None]).sum(-2), states[:, -1]
            outputs = self.named(f"{site}.attention_head_outputs", outputs)
            last = self.named(f"{site}.state_output", last)
            return outputs, (last if output_final_state else None)

        return forward

    def mask(self, attention_mask, query):
        """Eager attention gets the additive mask; sdpa a boolean one, or none at all for a causal prompt."""
        if attention_mask is not None and attention_mask.is_floating_point():
            return attention_mask
        if attention_mask is None:
            return additive_mask(torch.ones(query.shape[0], query.shape[2]), query.dtype)
        return torch.where(attention_mask, torch.tensor(0.0, dtype=query.dtype), torch.finfo(query.dtype).min)

    def vision_attention(self, original, module, query, key, value, scaling, kwargs):
        """Called once per image: the whole row is the calls' arguments put back together."""
        site = self.site()
        if site not in self.segments:
            self.segments[site] = []
            self.run.order += [f"{site}.attention_{name}" for name in ("queries", "keys", "values")]
        self.segments[site].append((query, key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * scaling
        scores = self.named_part(f"{site}.image_attention_scores", scores[0])
        pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        pattern = self.named_part(f"{site}.image_attention_probabilities", pattern)
        if {f"{site}.image_attention_scores", f"{site}.image_attention_probabilities"} & self.edited:
            return torch.matmul(pattern[None], value).transpose(1, 2).contiguous(), None
        return original(
            module,
            query,
            key,
            value,
            attention_mask=None,
            scaling=scaling,
            **{k: v for k, v in kwargs.items() if k != "attention_mask"},
        )

    def finish(self, attention_mask):
        for site, segments in self.segments.items():
            for name, parts in zip(("queries", "keys", "values"), zip(*segments, strict=True), strict=False):
                self.run.values[f"{site}.attention_{name}"] = torch.cat(parts, dim=2)
        last = self.run.logits.shape[1] - 1 - attention_mask.flip(1).argmax(1)
        rows = self.run.logits[torch.arange(len(last)), last]
        self.run.values["next_token_probs"] = rows.softmax(-1)
        self.run.order.append("next_token_probs")


def _frozen(output: Any) -> Any:
    """A snapshot of an output object that a caller goes on to change."""
    return type(output)(**output) if hasattr(output, "items") else output
