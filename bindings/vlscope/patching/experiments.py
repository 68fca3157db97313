"""Whole experiments: sweeps of patches and ablations, attribution, paths."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, NotReachedError
from ..sites import dims, expand, expand_below, read, write
from .donors import Prompt, collect, encoded
from .edits import Replacement, Selection, axis_of, fitting, one_tensor, replace, selected

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

Metric = Callable[[torch.Tensor], Any] | Sequence[Any]

#: What `path` freezes, where a model has it.
BRANCHES = (
    "vision.layers.*.self_attn.attention_output",
    "vision.layers.*.mlp.mlp_output",
    "layers.*.self_attn.attention_output",
    "layers.*.mlp.mlp_output",
)

_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """What an experiment gave for each site and position.

    Attributes:
        values: [sites, positions], the metric of each run (of `attribution`: its estimated change).
        sites: the site of each row.
        layers: the block of each row; None for a site outside the blocks.
        positions: the indices that each column stands for, along `axis`.
        axis: the axis that the columns run along: "seq", "patches", "image_tokens", "heads", ...
        tokens: the text of each column's tokens; along other axes their indices.
        corrupted: the metric of the run without a change.
        clean: the metric of the run that the values came from; None where no single run is that.
    """

    values: torch.Tensor
    sites: tuple[str, ...]
    layers: tuple[int | None, ...]
    positions: tuple[tuple[int, ...], ...]
    axis: str
    tokens: tuple[str, ...]
    corrupted: float
    clean: float | None

    @property
    def recovered(self) -> torch.Tensor:
        """[sites, positions], the share of the way from `corrupted` (0) to `clean` (1)."""
        if self.clean is None:
            raise InputError("these values came from no single run: compare `values` with `corrupted`")
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        return f"Cells({self.sites[0]} to {self.sites[-1]}, {rows} sites x {columns} places along {self.axis})"


def sweep(
    model: StandardizedTransformer,
    clean: Prompt,
    corrupted: Prompt,
    site: str = "layer_output",
    layers: int | Sequence[int] | None = None,
    positions: Sequence[Selection] | None = None,
    *,
    metric: Metric,
    axis: str | None = None,
    progress: bool = True,
) -> Cells:
    """Activation patching: the corrupted prompt is run once for each site and position, with the
    clean run's value in place of its own there (Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022,
    arXiv:2202.05262; conventions of Heimersheim and Nanda 2024, arXiv:2404.15255). The corrupted run is
    recorded (`model.record`), so that each cell computes from the block on that it changes.

    Args:
        site: a value below the block, such as "self_attn.attention_output", in all blocks or in
            those of `layers`; or a site or pattern of the whole model, such as
            "vision.layers.*.layer_output".
        positions: the columns, each an index, a slice or a list of indices that are patched
            together; each position by itself if not given.
        axis: the axis of the value that `positions` run along: by default that of the tokens or
            patches; "heads" patches head by head.
        progress: a progress bar on a terminal.

    Returns:
        `Cells`, with `values` [sites, positions].

    Raises:
        InputError: the prompts differ in their number of tokens, or the values in shape.
    """
    source, target = encoded(model, clean), encoded(model, corrupted)
    _check_alignment(source, target)
    measure = _metric(model, metric)
    sites = expand_below(model, site, layers)
    values = collect(model, source, sites)
    cells = _run_cells(model, target, values, _Plan(sites, positions, axis, measure, progress))
    return dataclasses.replace(cells, clean=measure.run(model, source))


def ablate(
    model: StandardizedTransformer,
    prompt: Prompt,
    by: Replacement,
    site: str = "layer_output",
    layers: int | Sequence[int] | None = None,
    positions: Sequence[Selection] | None = None,
    *,
    metric: Metric,
    axis: str | None = None,
    progress: bool = True,
) -> Cells:
    """Ablation of each site and position in turn; `by` says what is put there: `zero`, `noise(...)`,
    the values of `mean(...)` or `resample(...)`, any mapping from sites to tensors, or a function
    of the value and its site. The other arguments are those of `sweep`.
    """
    plan = _Plan(expand_below(model, site, layers), positions, axis, _metric(model, metric), progress)
    return _run_cells(model, encoded(model, prompt), by, plan)


def attribution(
    model: StandardizedTransformer,
    clean: Prompt,
    corrupted: Prompt,
    site: str = "layer_output",
    layers: int | Sequence[int] | None = None,
    *,
    metric: Metric,
    axis: str | None = None,
) -> Cells:
    """Attribution patching: for every site and position, the first-order estimate of what `sweep`
    would change, from one forward of each prompt and one backward of the corrupted one:

        values[s, p] = sum over the value's other axes of (clean - corrupted) * d metric / d value

    with the derivative taken in the corrupted run (Nanda 2023, "Attribution patching"; Syed et al.
    2023, arXiv:2310.10348). The metric must be differentiable. Arguments and errors are those of
    `sweep`; `values` are changes of the metric, to be compared with `sweep(...).values - corrupted`.
    """
    source, target = encoded(model, clean), encoded(model, corrupted)
    _check_alignment(source, target)
    measure = _metric(model, metric)
    sites = expand_below(model, site, layers)
    where, shape = _layout(model, target, sites, axis)
    values = collect(model, source, sites)
    with torch.enable_grad(), model.trace(**target, **measure.needs):
        served = []
        for name in sites:
            value = read(model, name)
            served.append(value if value.requires_grad else value.requires_grad_())
        score = measure.of(model.logits)
        gradients = torch.autograd.grad(score, served, allow_unused=True)
    rows = []
    for name, value, gradient in zip(sites, served, gradients, strict=True):
        donor = fitting(values[name], value, name)
        effect = torch.zeros_like(value) if gradient is None else (donor - value.detach()) * gradient
        rows.append(effect.sum([k for k in range(effect.ndim) if k != where]))
    columns = [(index,) for index in range(shape[where])]
    labels = _labels(model, target, sites, columns, dims(model, sites[0])[where])
    return Cells(torch.stack(rows).cpu(), corrupted=score.item(), clean=measure.run(model, source), **labels)


def path(
    model: StandardizedTransformer,
    clean: Prompt,
    corrupted: Prompt,
    sender: str,
    receivers: str | Sequence[str],
    *,
    metric: Metric,
    sender_at: Mapping[str, Selection] | None = None,
    receiver_at: Mapping[str, Selection] | None = None,
    freeze: Sequence[str] | None = None,
) -> float:
    """Path patching: the metric of the corrupted run when only the paths from `sender` to `receivers`
    carry the clean run's value (Wang et al. 2022, arXiv:2211.00593, section 3.1; Goldowsky-Dill et al.
    2023, arXiv:2304.05969). Three steps:

    1. The corrupted prompt is run with the sender's value taken from the clean run, and with every
       frozen value between the sender and the last receiver held at its corrupted value. What each
       receiver would be is noted; a receiver that is itself frozen is noted first and then held.
    2. The corrupted prompt is run with the receivers' values replaced by those noted, all else free.
    3. The metric is taken of that run.

    Frozen are by default the attention outputs and MLP outputs of all blocks of both towers, except
    the one that the sender is inside of: the sender reaches a receiver by the residual stream alone.
    Norms, projections, the merger and the DeepStack mergers are recomputed. With
    `freeze=["layers.*.self_attn.attention_output"]` the MLPs are recomputed too, as in Wang et al.;
    with `freeze=[]` every path up to the receivers counts.

    Args:
        sender: one site.
        receivers: sites or patterns; all are replaced together.
        sender_at, receiver_at: the part of the values that is patched, by axis, as in `replace`:
            `{"heads": 3}`, `{"seq": -1}`. All of it by default.

    Raises:
        InputError: prompts that do not align; a receiver that comes before the sender.
    """
    source, target = encoded(model, clean), encoded(model, corrupted)
    _check_alignment(source, target)
    senders, targets = expand(model, sender), expand(model, receivers)
    if len(senders) != 1:
        raise InputError(f"{sender!r} stands for {len(senders)} sites; a path has one sender")
    sender = senders[0]
    if model.order(targets[0]) < model.order(sender):
        raise InputError(f"{targets[0]} comes before {sender} in the forward: no path leads there")
    held = _between(model, target, sender, targets[-1], freeze)
    donor, base = collect(model, source, sender), collect(model, target, held)
    noted: dict[str, torch.Tensor] = {}
    measure = _metric(model, metric)
    with torch.no_grad(), model.trace(**target, **measure.needs):
        replace(model, sender, donor, **(sender_at or {}))
        for site in expand(model, [*targets, *held]):
            if site in targets:
                noted[site] = read(model, site).clone()
            if site in held:
                write(model, site, base[site])
    with torch.no_grad(), model.trace(**target, **measure.needs):
        for site in targets:
            replace(model, site, noted, **(receiver_at or {}))
        return measure.of(model.logits).item()


def _between(
    model: StandardizedTransformer, run: Mapping[str, Any], sender: str, last: str, freeze: Sequence[str] | None
) -> list[str]:
    """The frozen sites after the sender and up to the last receiver that a run comes by."""
    patterns = [name for name in BRANCHES if model.task != "text-generation" or not name.startswith("vision")]
    reached = model.scan(**run)
    first, end = model.order(sender), model.order(last)
    return [
        site
        for site in expand(model, patterns if freeze is None else freeze)
        if site in reached and first < model.order(site) <= end and not sender.startswith(site.rpartition(".")[0] + ".")
    ]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sites, columns and metric of a sweep."""

    sites: list[str]
    positions: Sequence[Selection] | None
    axis: str | None
    measure: _Measure
    progress: bool


def _run_cells(model: StandardizedTransformer, run: Mapping[str, Any], by: Replacement, plan: _Plan) -> Cells:
    """The metric of `run` with one site and position replaced at a time."""
    from tqdm import tqdm

    where, shape = _layout(model, run, plan.sites, plan.axis)
    axis, length = dims(model, plan.sites[0])[where], shape[where]
    columns = [
        tuple(selected(choice, length, axis, plan.sites[0]).nonzero().flatten().tolist())
        for choice in (range(length) if plan.positions is None else plan.positions)
    ]
    if () in columns:
        raise InputError(
            f"column {columns.index(())} of positions selects none of the {length} {axis}: nothing to patch"
        )
    corrupted = plan.measure.run(model, run)
    values = torch.empty(len(plan.sites), len(columns), dtype=torch.float64)
    recorded = model.record(**run)
    quiet = None if plan.progress else True  # None: shown on a terminal
    with torch.no_grad(), tqdm(total=values.numel(), disable=quiet, leave=False) as bar:
        for row, site in enumerate(plan.sites):
            for column, indices in enumerate(columns):
                with model.trace(recorded, **plan.measure.needs):
                    replace(model, site, by, **{axis: indices})
                    values[row, column] = plan.measure.of(model.logits)
                bar.update()
    return Cells(values, corrupted=corrupted, clean=None, **_labels(model, run, plan.sites, columns, axis))


def _check_alignment(clean: Mapping[str, Any], corrupted: Mapping[str, Any]) -> None:
    lengths = [run["input_ids"].shape[1] for run in (clean, corrupted)]
    if lengths[0] != lengths[1]:
        raise InputError(
            f"the clean prompt has {lengths[0]} tokens and the corrupted one {lengths[1]}: positions stand for each "
            "other only in prompts of the same length"
        )


class _Measure:
    """A metric, and the arguments (`needs`) of a trace that it measures."""

    def __init__(self, function: Callable[[torch.Tensor], Any], needs: Mapping[str, Any]) -> None:
        self._function = function
        self.needs = needs

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The metric, a tensor of one element."""
        score = torch.as_tensor(self._function(logits))
        if score.numel() != 1:
            raise InputError(f"the metric gave {list(score.shape)}; it has to give one number")
        return score.reshape(())

    def run(self, model: StandardizedTransformer, run: Mapping[str, Any]) -> float:
        """The metric of a plain run."""
        with torch.no_grad(), model.trace(**run, **self.needs):
            return self.of(model.logits).item()


def _metric(model: StandardizedTransformer, metric: Metric) -> _Measure:
    if callable(metric):
        return _Measure(metric, {})
    if isinstance(metric, str) or len(metric) != 2:
        raise InputError(f"metric is {metric!r}; give a function of the logits, or two tokens")
    first, second = (_token(model, token) for token in metric)
    return _Measure(lambda logits: logits[0, -1, first] - logits[0, -1, second], {"logits_to_keep": 1})


def _token(model: StandardizedTransformer, token: Any) -> int:
    if not isinstance(token, str):
        return int(token)
    ids = model.tokenizer.encode(token)
    if len(ids) != 1:
        raise InputError(f"{token!r} is {len(ids)} tokens; a metric takes single tokens (mind the leading space)")
    return int(ids[0])


def _layout(
    model: StandardizedTransformer, run: Mapping[str, Any], sites: Sequence[str], axis: str | None
) -> tuple[int, torch.Size]:
    """The axis of the columns, and the shape of the sites' values in a run; found without running."""
    where = axis_of(dims(model, sites[0]), axis, sites[0])
    shapes = model.scan(**run)
    for site in sites:
        if site not in shapes:
            raise NotReachedError(f"the forward of this prompt does not come by {site}")
        other, length = one_tensor(shapes[site], site).shape, shapes[sites[0]].shape[where]
        if where >= len(other) or other[where] != length or dims(model, site)[where] != dims(model, sites[0])[where]:
            raise InputError(f"{sites[0]} and {site} differ in their axes: sweep them one after the other")
    return where, shapes[sites[0]].shape


def _labels(
    model: StandardizedTransformer,
    run: Mapping[str, Any],
    sites: Sequence[str],
    columns: Sequence[tuple[int, ...]],
    axis: str,
) -> dict[str, Any]:
    """What stands at the rows and columns of `Cells`."""
    tokens = [", ".join(map(str, column)) for column in columns]
    if axis in ("seq", "query") and model.tokenizer is not None:
        ids = run["input_ids"][0].tolist()
        texts = [[ids[k] for k in column] for column in columns]
        tokens = [model.tokenizer.decode(text, skip_special_tokens=False) for text in texts]
    blocks = [_BLOCK.search(site) for site in sites]
    layers = tuple(int(block[1]) if block else None for block in blocks)
    return {
        "sites": tuple(sites),
        "layers": layers,
        "positions": tuple(columns),
        "axis": axis,
        "tokens": tuple(tokens),
    }
