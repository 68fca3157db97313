"""Whole experiments: sweeps of patches and ablations, attribution, paths."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError, NotReachedError
from ..sites import dims, expand, expand_below, read, write
from ..trace import save
from .donors import Prompt, collect, encoded
from .edits import Replacement, Selection, axis_of, fitting, matching, parts_of, put, read_parts, selected

if TYPE_CHECKING:
    from ..model import StandardizedTransformer
    from ..recording import Recording

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
        axis: the axis that the columns run along: "seq", "patches", "image_tokens", "heads", ...; its number
            where it was given by that.
        tokens: the text of each column's tokens; their indices along other axes, and where the prompts
            of a batch differ.
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
    axis: str | int | None = None,
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
    axis: str | int | None = None,
    progress: bool = True,
) -> Cells:
    """Ablation of each site and position in turn; `by` says what is put there: `zero`, `noise(...)`,
    the values of `mean(...)` or `resample(...)`, any mapping from sites to tensors, or a function
    of the value and its site. The other arguments are those of `sweep`.
    """
    run = encoded(model, prompt)
    plan = _Plan(expand_below(model, site, layers), positions, axis, _metric(model, metric, run), progress)
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
    columns = _columns(model, target, sites, axis)
    with torch.no_grad(), model.trace(**source, **measure.needs):
        values = {name: read_parts(model, name) for name in sites}
        reached = measure.of(model.logits).item()
    with torch.enable_grad(), model.trace(**target, **measure.needs):
        served = {name: [_with_grad(part) for part in read_parts(model, name)] for name in sites}
        score = measure.of(model.logits)
        parts = [part for name in sites for part in served[name]]
        gradients = iter(torch.autograd.grad(score, parts, allow_unused=True))
    rows = []
    for name in sites:
        donors = matching(values[name], served[name], name)
        effects = [
            _first_order(fitting(donor, part, name), part, next(gradients), columns.where)
            for donor, part in zip(donors, served[name], strict=True)
        ]
        rows.append(torch.stack(effects).sum(0))
        if len(rows[-1]) != columns.length:
            raise InputError(
                f"{name} holds the last position alone where the metric is a pair of tokens: give a function of the "
                "logits"
            )
    each = [(index,) for index in range(columns.length)]
    labels = _labels(model, target, sites, each, columns.name)
    return Cells(torch.stack(rows).cpu(), corrupted=score.item(), clean=reached, **labels)


def _with_grad(value: torch.Tensor) -> torch.Tensor:
    return value if value.requires_grad else value.requires_grad_()


def _first_order(donor: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor | None, where: int) -> torch.Tensor:
    """The estimated effect along one axis; zero where the metric does not depend on the value."""
    effect = torch.zeros_like(value) if gradient is None else (donor - value.detach()) * gradient
    return effect.sum([k for k in range(effect.ndim) if k != where])


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
    measure = _metric(model, metric, target)
    held = _between(model, target, sender, targets[-1], freeze)
    donor, recorded = collect(model, source, sender), model.record(target)
    base = _collect_from(model, recorded, held)
    noted: dict[str, Any] = {}
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
    """`collect` from a recording, which need not run what comes before the first of the sites."""
    with torch.no_grad(), model.trace(recorded):
        return {name: save(read(model, name)) for name in sites}


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
    axis: str | int | None
    measure: _Measure
    progress: bool


def _run_cells(model: StandardizedTransformer, run: Mapping[str, Any], by: Replacement, plan: _Plan) -> Cells:
    """The metric of `run` with one site and position replaced at a time."""
    from tqdm import tqdm

    along = _columns(model, run, plan.sites, plan.axis)
    columns = [
        tuple(selected(choice, along.length, along.name, plan.sites[0]).nonzero().flatten().tolist())
        for choice in (range(along.length) if plan.positions is None else plan.positions)
    ]
    if () in columns:
        raise InputError(
            f"column {columns.index(())} of positions selects none of the {along.length} {along.name}: nothing to patch"
        )
    corrupted = plan.measure.run(model, run)
    values = torch.empty(len(plan.sites), len(columns), dtype=torch.float64)
    recorded = model.record(**run)
    quiet = None if plan.progress else True  # None: shown on a terminal
    with torch.no_grad(), tqdm(total=values.numel(), disable=quiet, leave=False) as bar:
        for row, site in enumerate(plan.sites):
            for column, indices in enumerate(columns):
                with model.trace(recorded, **plan.measure.needs):
                    put(model, site, by, {along.where: indices})
                    values[row, column] = plan.measure.of(model.logits)
                bar.update()
    return Cells(values, corrupted=corrupted, clean=None, **_labels(model, run, plan.sites, columns, along.name))


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
    tokens = torch.tensor([[_token(model, token) for token in pair] for pair in pairs])

    def difference(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits[:, -1].gather(1, tokens.to(logits.device))
        return (chosen[:, 0] - chosen[:, 1]).mean()

    return _Measure(difference, {"logits_to_keep": 1})


def _token(model: StandardizedTransformer, token: Any) -> int:
    if not isinstance(token, str):
        return int(token)
    ids = model.tokenizer.encode(token)
    if len(ids) != 1:
        raise InputError(f"{token!r} is {len(ids)} tokens; a metric takes single tokens (mind the leading space)")
    return int(ids[0])


class _Columns(NamedTuple):
    """The axis of sites that the columns of `Cells` run along."""

    where: int
    length: int
    name: str


def _columns(
    model: StandardizedTransformer, run: Mapping[str, Any], sites: Sequence[str], axis: str | int | None
) -> _Columns:
    """The columns of sites in a run; found without running."""
    shapes = model.scan(**run)
    found = []
    for site in sites:
        if site not in shapes:
            raise NotReachedError(f"the forward of this prompt does not come by {site}")
        for part in parts_of(shapes[site]):
            where = axis_of(model, site, axis, part.ndim)
            name = str(where) if isinstance(axis, int) else dims(model, site)[where]
            found.append(_Columns(where, part.shape[where], name))
            if found[-1] != found[0]:
                both = sites[0] if site == sites[0] else f"{sites[0]} and {site}"
                raise InputError(
                    f"{both}: {found[0].length} along {found[0].name} and {found[-1].length} along {name}, which are "
                    "no columns of one table: take another axis, or one site after the other"
                )
    return found[0]


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
