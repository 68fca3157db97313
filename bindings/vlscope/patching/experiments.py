"""Whole experiments: sweeps of patches and ablations, attribution, paths."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import InputError
from ..prompts import single_token
from ..sites import dims, expand, expand_below, reaches, read, write
from ..trace import save
from .affected import Columns, Tails, reaches_rows_alone, whole
from .donors import Prompt, collect, encoded
from .edits import Replacement, Selection, axis_of, fitting, matching, put, read_parts, selected

if TYPE_CHECKING:
    from ..model import StandardizedTransformer
    from ..recording import Recording

Metric = Callable[[torch.Tensor], Any] | Sequence[Any]
Rows = Literal["all", "affected"]

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
        axis: the axis that the columns run along: "seq", "patches", "image_tokens", "heads", ...; its number
            where it was given by that.
        tokens: the text of each column's tokens; their indices along other axes, and where the prompts
            of a batch differ.
        corrupted: the metric of the run without a change.
        clean: the metric of the run that the values came from; None where no single run is that.
        rows: "all", or "affected" where only the rows that a change reaches were computed.
        estimated: the values are estimates of changes, as those of `attribution`.
    """

    values: torch.Tensor
    sites: tuple[str, ...]
    layers: tuple[int | None, ...]
    positions: tuple[tuple[int, ...], ...]
    axis: str
    tokens: tuple[str, ...]
    corrupted: float
    clean: float | None
    rows: Rows = "all"
    estimated: bool = False

    @property
    def effects(self) -> torch.Tensor:
        """[sites, positions], by how much each cell changes the metric."""
        return self.values if self.estimated else self.values - self.corrupted

    @property
    def recovered(self) -> torch.Tensor:
        """[sites, positions], the share of the way from `corrupted` (0) to `clean` (1)."""
        if self.clean is None:
            raise InputError("these values came from no single run: compare `values` with `corrupted`")
        return self.effects / (self.clean - self.corrupted)

    def plot(self, figure: Any = None) -> Any:
        """A heat map of sites and positions, labelled by blocks and tokens: of `recovered`, or of `effects`
        where no single clean run is known. Gives a matplotlib figure; see `vlscope.plot`.

        Raises:
            MissingPackage: matplotlib is not installed.
        """
        from ..plot.cells import draw_cells

        return draw_cells(self, figure)

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
    axis: str | int | None = None,
    rows: Rows = "all",
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
            patches; "heads" patches head by head. Of a native site whose axes have no names, its number.
        rows: "all" runs every cell by itself and gives the bits of plain traces. "affected" runs the
            rows that a change reaches, from its position on, many cells in one forward: the same
            values within 1e-5 in a fraction of the time. Where that cannot be (outside the text
            blocks, in a batch, along an axis by its number, or while the model keeps edits) all rows are
            run; `Cells.rows` says which it was.
        progress: a progress bar on a terminal.

    Returns:
        `Cells`, with `values` [sites, positions].

    Raises:
        InputError: the prompts differ in their number of tokens, or the values in shape.
    """
    source, target = encoded(model, clean), encoded(model, corrupted)
    _check_alignment(source, target)
    measure = _metric(model, metric, target)
    sites = expand_below(model, site, layers)
    values = collect(model, source, sites)
    cells = _run_cells(model, target, values, _Plan(sites, positions, axis, measure, rows, progress))
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
    axis: str | int | None = None,
    rows: Rows = "all",
    progress: bool = True,
) -> Cells:
    """Ablation of each site and position in turn; `by` says what is put there: `zero`, `noise(...)`,
    the values of `mean(...)` or `resample(...)`, any mapping from sites to tensors, or a function
    of the value and its site. The other arguments are those of `sweep`.
    """
    run = encoded(model, prompt)
    plan = _Plan(expand_below(model, site, layers), positions, axis, _metric(model, metric, run), rows, progress)
    return _run_cells(model, run, by, plan)


def attribution(
    model: StandardizedTransformer,
    clean: Prompt,
    corrupted: Prompt,
    site: str = "layer_output",
    layers: int | Sequence[int] | None = None,
    *,
    metric: Metric,
    axis: str | int | None = None,
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
    measure = _metric(model, metric, target)
    sites = expand_below(model, site, layers)
    _check_whole(model, sites, measure)
    where = _common_axis(model, sites, axis)
    with torch.no_grad(), model.trace(**source, **measure.needs):
        values = {name: read_parts(model, name) for name in sites}
        reached = measure.of(model.logits).item()
    with torch.enable_grad(), model.trace(**target, **measure.needs):
        served = {name: [_with_grad(part) for part in read_parts(model, name)] for name in sites}
        length = _common_length(model, {name: [part.shape for part in served[name]] for name in sites}, where)
        score = measure.of(model.logits)
        parts = [part for name in sites for part in served[name]]
        gradients = iter(torch.autograd.grad(score, parts, allow_unused=True))
    effects = []
    for name in sites:
        pairs = zip(matching(values[name], served[name], name), served[name], strict=True)
        each = [_first_order(fitting(donor, part, name), part, next(gradients), where) for donor, part in pairs]
        effects.append(torch.stack(each).sum(0))
    labels = _labels(model, target, sites, [(index,) for index in range(length)], _axis_name(model, sites, where, axis))
    return Cells(torch.stack(effects).cpu(), corrupted=score.item(), clean=reached, **labels, estimated=True)


def _with_grad(value: torch.Tensor) -> torch.Tensor:
    return value if value.requires_grad else value.requires_grad_()


def _first_order(donor: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor | None, where: int) -> torch.Tensor:
    """The estimated effect along one axis; zero where the metric does not depend on the value."""
    effect = torch.zeros_like(value) if gradient is None else (donor - value.detach()) * gradient
    return effect.sum([k for k in range(effect.ndim) if k != where % effect.ndim])


def path(
    model: StandardizedTransformer,
    clean: Prompt,
    corrupted: Prompt,
    sender: str,
    receivers: str | Sequence[str],
    *,
    metric: Metric,
    sender_at: Mapping[str | int, Selection] | None = None,
    receiver_at: Mapping[str | int, Selection] | None = None,
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
            `{"heads": 3}`, `{"seq": -1}`; an axis may go by its number. All of it by default.

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
    donor, recorded = collect(model, source, sender), model.record(target)
    base = _collect_from(model, recorded, held)
    noted: dict[str, Any] = {}
    measure = _metric(model, metric, target)
    with torch.no_grad(), model.trace(recorded, **measure.needs):
        put(model, sender, donor, sender_at or {})
        for site in expand(model, [*targets, *held]):
            if site in targets:
                noted[site] = tuple(part.clone() for part in read_parts(model, site))
            if site in held:
                write(model, site, base[site])
    with torch.no_grad(), model.trace(recorded, **measure.needs):
        for site in targets:
            put(model, site, noted, receiver_at or {})
        return measure.of(model.logits).item()


def _collect_from(model: StandardizedTransformer, recorded: Recording, sites: Sequence[str]) -> dict[str, Any]:
    """`collect` from a recording, which runs from the first of the sites on."""
    with torch.no_grad(), model.trace(recorded):
        return {name: save(read(model, name)) for name in sites}


def _between(
    model: StandardizedTransformer, run: Mapping[str, Any], sender: str, last: str, freeze: Sequence[str] | None
) -> list[str]:
    """The frozen sites after the sender and up to the last receiver that a run comes by."""
    patterns = [name for name in BRANCHES if model.task != "text-generation" or not name.startswith("vision")]
    first, end = model.order(sender), model.order(last)
    between = [
        site
        for site in expand(model, patterns if freeze is None else freeze)
        if first < model.order(site) <= end and not sender.startswith(site.rpartition(".")[0] + ".")
    ]
    with model.trace(**run) as tracer:  # nothing is computed
        return [site for site in between if reaches(tracer, site)]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sites, columns and metric of a sweep."""

    sites: list[str]
    positions: Sequence[Selection] | None
    axis: str | int | None
    measure: _Measure
    rows: Rows
    progress: bool


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """What the cells of a sweep are made of: the run, what is put into it and where, and the run as it is."""

    run: Mapping[str, Any]
    by: Replacement
    plan: _Plan
    columns: Columns
    baseline: _Baseline


def _run_cells(model: StandardizedTransformer, run: Mapping[str, Any], by: Replacement, plan: _Plan) -> Cells:
    """The metric of `run` with one site and position replaced at a time."""
    from tqdm import tqdm

    if plan.rows not in ("all", "affected"):
        raise InputError(f"rows is {plan.rows!r}; give 'all' or 'affected'")
    _check_whole(model, plan.sites, plan.measure)
    where = _common_axis(model, plan.sites, plan.axis)
    baseline = _baseline(model, run, plan.sites, plan.measure)
    length, axis = _common_length(model, baseline.shapes, where), _axis_name(model, plan.sites, where, plan.axis)
    columns = Columns(_columns(plan, length, axis), where, axis in ("seq", "query"))
    values = torch.empty(len(plan.sites), len(columns.indices), dtype=torch.float64)
    alone = len(run["input_ids"]) == 1 and not isinstance(plan.axis, int)
    affected = plan.rows == "affected" and alone and reaches_rows_alone(model, plan.sites)
    cells = _affected_cells if affected else _whole_cells
    quiet = None if plan.progress else True  # None: shown on a terminal
    with torch.no_grad(), tqdm(total=values.numel(), disable=quiet, leave=False) as bar:
        for row, column, value in cells(model, _Sweep(run, by, plan, columns, baseline)):
            values[row, column] = value
            bar.update()
    labels = _labels(model, run, plan.sites, columns.indices, axis)
    return Cells(values, corrupted=baseline.score, clean=None, rows="affected" if affected else "all", **labels)


def _columns(plan: _Plan, length: int, axis: str) -> list[tuple[int, ...]]:
    """The indices of each column."""
    columns = [
        tuple(selected(choice, length, axis, plan.sites[0]).nonzero().flatten().tolist())
        for choice in (range(length) if plan.positions is None else plan.positions)
    ]
    if () in columns:
        raise InputError(
            f"column {columns.index(())} of positions selects none of the {length} {axis}: nothing to patch"
        )
    return columns


def _whole_cells(model: StandardizedTransformer, sweep: _Sweep) -> Iterator[tuple[int, int, float]]:
    """Row, column and metric of each cell, in a trace of its own."""
    recorded = model.record(**sweep.run)
    for row, site in enumerate(sweep.plan.sites):
        for column, indices in enumerate(sweep.columns.indices):
            with model.trace(recorded, **sweep.plan.measure.needs):
                put(model, site, sweep.by, {sweep.columns.where: indices})
                value = sweep.plan.measure.of(model.logits).item()
            yield row, column, value


def _affected_cells(model: StandardizedTransformer, sweep: _Sweep) -> Iterator[tuple[int, int, float]]:
    """The same from the rows that each change reaches."""
    recorded = model.record(**sweep.run, keys=True)
    before = None
    if not sweep.plan.measure.needs:  # the metric is given the logits of all positions
        with model.trace(recorded):
            before = model.logits
    tails = Tails(model, recorded, sweep.columns, sweep.plan.measure, before)
    by = sweep.by
    for row, site in enumerate(sweep.plan.sites):
        value = by(_collect_from(model, recorded, [site])[site], site) if callable(by) else by[site]
        donor = whole(value, sweep.baseline.shapes[site][0], site)
        for column, metric in tails.cells(site, donor):
            yield row, column, metric


def _check_alignment(clean: Mapping[str, Any], corrupted: Mapping[str, Any]) -> None:
    counts, lengths = zip(*(run["input_ids"].shape for run in (clean, corrupted)), strict=True)
    if counts[0] != counts[1]:
        raise InputError(f"there are {counts[0]} clean prompts and {counts[1]} corrupted ones: give one for each")
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


def _metric(model: StandardizedTransformer, metric: Metric, run: Mapping[str, Any]) -> _Measure:
    """The metric of a run's logits: pairs of tokens are averaged over its prompts."""
    if callable(metric):
        return _Measure(metric, {})
    count = len(run["input_ids"])
    several = not isinstance(metric, str) and any(isinstance(item, (tuple, list)) for item in metric)
    pairs = list(metric) if several else [metric] * count
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"metric is {metric!r}; give a function of the logits, or two tokens")
    if len(pairs) != count:
        raise InputError(f"metric is {len(pairs)} pairs of tokens, and there are {count} prompts: give one for each")
    tokens = torch.tensor([[single_token(model, token, "a metric") for token in pair] for pair in pairs])

    def difference(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits[:, -1].gather(1, tokens.to(logits.device))
        return (chosen[:, 0] - chosen[:, 1]).mean()

    return _Measure(difference, {"logits_to_keep": 1})


@dataclasses.dataclass(frozen=True)
class _Baseline:
    """The run without a change: its metric, and the shapes of every site's tensors, one or several."""

    score: float
    shapes: dict[str, list[torch.Size]]


def _baseline(
    model: StandardizedTransformer, run: Mapping[str, Any], sites: Sequence[str], measure: _Measure
) -> _Baseline:
    with torch.no_grad(), model.trace(**run, **measure.needs):
        shapes = {site: [part.shape for part in read_parts(model, site)] for site in sites}
        return _Baseline(measure.of(model.logits).item(), shapes)


def _common_axis(model: StandardizedTransformer, sites: Sequence[str], axis: str | int | None) -> int:
    """The axis of the columns, of one name in the values of all sites, unless it was given by its number."""
    if isinstance(axis, int):
        return axis
    first = dims(model, sites[0])
    where = axis_of(model, sites[0], axis, len(first))
    for site in sites:
        if dims(model, site)[where : where + 1] != first[where : where + 1]:
            raise InputError(f"{sites[0]} and {site} differ in their axes: sweep them one after the other")
    return where


def _axis_name(model: StandardizedTransformer, sites: Sequence[str], where: int, axis: str | int | None) -> str:
    return str(axis) if isinstance(axis, int) else dims(model, sites[0])[where]


def _common_length(model: StandardizedTransformer, shapes: Mapping[str, Sequence[torch.Size]], where: int) -> int:
    """The length of an axis, the same in all tensors of all sites."""
    found = [
        (site, shape[axis_of(model, site, where, len(shape))]) for site, parts in shapes.items() for shape in parts
    ]
    (first, length), *others = found
    for site, other in others:
        if other != length:
            both = first if site == first else f"{first} and {site}"
            raise InputError(
                f"{both} differ in their axes: there are {length} and {other} along axis {where}. Sweep along another "
                "one, or one site after the other"
            )
    return length


def _check_whole(model: StandardizedTransformer, sites: Sequence[str], measure: _Measure) -> None:
    """Refuses sites that hold the last position alone for the sake of the metric."""
    for site in sites if measure.needs else ():
        if model.order(site) >= model.order("lm_head.input"):
            raise InputError(
                f"{site} holds the last position alone where the metric is a pair of tokens: give a function of the "
                "logits"
            )


def _labels(
    model: StandardizedTransformer,
    run: Mapping[str, Any],
    sites: Sequence[str],
    columns: Sequence[tuple[int, ...]],
    axis: str,
) -> dict[str, Any]:
    """What stands at the rows and columns of `Cells`."""
    tokens = [", ".join(map(str, column)) for column in columns]
    of_text = axis in ("seq", "query") and not sites[0].startswith("vision.")
    if of_text and model.tokenizer is not None:
        ids, alike = run["input_ids"], (run["input_ids"] == run["input_ids"][0]).all(0)
        for index, column in enumerate(map(list, columns)):
            if alike[column].all():
                tokens[index] = model.tokenizer.decode(ids[0, column].tolist(), skip_special_tokens=False)
    blocks = [_BLOCK.search(site) for site in sites]
    layers = tuple(int(block[1]) if block else None for block in blocks)
    return {
        "sites": tuple(sites),
        "layers": layers,
        "positions": tuple(columns),
        "axis": axis,
        "tokens": tuple(tokens),
    }
