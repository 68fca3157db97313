"""Which rows the values of a batch have, where each comes from, and which of them are kept."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..index_maps import ImageTokens, PromptRows, prompt_rows
from ..sites import dims, expand

if TYPE_CHECKING:
    from ..model import StandardizedTransformer

__all__ = ["COLUMNS", "Located", "RowIndex", "Selection", "Site", "check_rows", "describe_rows", "locate", "resolve"]

#: The axes along which a value has a row for each token, patch, or image token.
_ROW_AXES = ("seq", "patches", "image_tokens", "video_tokens")
#: Axes whose length depends on the prompt: rows of such values do not stack.
_PROMPT_AXES = (*_ROW_AXES, "query", "key")
_CHOICES = ("all", "image", "text", "last")


class Stream(enum.Enum):
    """What the rows of a value are."""

    TOKENS = "tokens of the prompt"
    PATCHES = "patches, in the order of the vision stream"
    EMBEDDINGS = "patches, in merge-block order"  # before a tower with windows lays them out
    IMAGES = "image tokens"
    VIDEOS = "video tokens"
    VISUAL = "image and video tokens"  # in the order of the prompt


@dataclasses.dataclass(frozen=True)
class Site:
    """A value to collect.

    Attributes:
        name: its site.
        axes: the names of its axes, the batch or images axis in front left out.
        axis: which of these its rows run along.
        batched: whether an axis in front stands for the prompts, or is 1.
        stream: what the rows are.
    """

    name: str
    axes: tuple[str, ...]
    axis: int
    batched: bool
    stream: Stream

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes of one row."""
        return tuple(name for k, name in enumerate(self.axes) if k != self.axis)

    def take(self, value: torch.Tensor, located: Located) -> torch.Tensor:
        """[rows, ...], the rows of a value of the batch that `located` names, as a copy."""
        if self.stream is Stream.TOKENS:
            return value.movedim(self.axis + 1, 1)[located.prompts, located.places]
        return (value[0] if self.batched else value).movedim(self.axis, 0)[located.places]


@dataclasses.dataclass(frozen=True, eq=False)
class RowIndex:
    """Where the rows of a value come from: columns of int64, each [rows], -1 where there is none.

    Attributes:
        sample: index in the dataset.
        position: of a token in its prompt, padding left out; of a patch in the vision stream of its prompt.
        token_id: the token there; -1 for patches.
        image: which of the prompt's images, and after them its videos.
        grid_row, grid_col: place in the grid of image tokens; of a patch in the grid of patches.
    """

    sample: torch.Tensor
    position: torch.Tensor
    token_id: torch.Tensor
    image: torch.Tensor
    grid_row: torch.Tensor
    grid_col: torch.Tensor

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, kept: torch.Tensor) -> RowIndex:
        return RowIndex(*(column[kept] for column in self.columns().values()))

    def columns(self) -> dict[str, torch.Tensor]:
        """The columns by name."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = tuple(field.name for field in dataclasses.fields(RowIndex))

Selection = str | Callable[[RowIndex], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Located:
    """Rows, and where they lie in the values of a batch: the row of the batch, and along the axis of rows."""

    index: RowIndex
    prompts: torch.Tensor
    places: torch.Tensor

    def __len__(self) -> int:
        return len(self.places)


def resolve(model: StandardizedTransformer, sites: str | Sequence[str]) -> list[Site]:
    """The sites that patterns stand for, in forward order.

    Raises:
        UnknownSite, Unavailable: what the model does not serve.
        InputError: values that do not have one row of a fixed shape for each token or patch.
    """
    return [_site(model, name) for name in expand(model, sites)]


def _site(model: StandardizedTransformer, name: str) -> Site:
    axes = _axes(model, name)
    batched = axes[0] in ("batch", "images")
    axes = axes[1:] if batched else axes
    along = [k for k, axis in enumerate(axes) if axis in _ROW_AXES]
    if len(along) != 1 or any(axis in _PROMPT_AXES for k, axis in enumerate(axes) if k not in along):
        raise InputError(
            f"{name} has the axes {', '.join(axes)}: what can be collected has one row of a fixed shape for each "
            "token or patch"
        )
    return Site(name, axes, along[0], batched, _stream(model, name, axes[along[0]]))


def _stream(model: StandardizedTransformer, name: str, axis: str) -> Stream:
    if axis == "patches":
        before = model.order(name) < model.order("vision.layers.0.layer_input")
        return Stream.EMBEDDINGS if before else Stream.PATCHES
    if axis == "image_tokens":
        return Stream.VISUAL if name.endswith(".deepstack_output") else Stream.IMAGES
    return Stream.VIDEOS if axis == "video_tokens" else Stream.TOKENS


def _axes(model: StandardizedTransformer, name: str) -> tuple[str, ...]:
    """The axes of a value by name. A native value without names (`layers.3.mlp.act_fn.output`) has
    those of a token stream where its shape on a text prompt says so."""
    try:
        return dims(model, name)
    except InputError:
        pass
    batch, seq = 2, 37  # no size of a model
    shape = getattr(model.scan(input_ids=torch.zeros(batch, seq, dtype=torch.long)).get(name), "shape", ())
    if tuple(shape[:2]) != (batch, seq):
        raise InputError(f"the axes of {name} have no names, and it is no token stream: give a named value")
    return ("batch", "seq", *("features" for _ in shape[2:]))


# --- where rows come from ---


def locate(
    model: StandardizedTransformer, batch: Mapping[str, torch.Tensor], samples: Sequence[int], select: Selection
) -> Callable[[Stream], Located]:
    """The rows of a batch that are kept, by stream; `samples` are the indices of its prompts."""
    prompts = prompt_rows(model, batch)
    ids = batch["input_ids"].cpu()
    known: dict[Stream, Located] = {}

    def of(stream: Stream) -> Located:
        if stream not in known:
            each = [
                _kept(_Prompt(ids, rows, sample).located(stream), select, stream)
                for rows, sample in zip(prompts, samples, strict=True)
            ]
            known[stream] = _joined(each)
        return known[stream]

    return of


def _joined(each: Sequence[Located]) -> Located:
    columns = (torch.cat([part.index.columns()[name] for part in each]) for name in COLUMNS)
    places = (torch.cat([getattr(part, name) for part in each]) for name in ("prompts", "places"))
    return Located(RowIndex(*columns), *places)


class _Prompt:
    """The rows of one prompt of a batch."""

    def __init__(self, ids: torch.Tensor, rows: PromptRows, sample: int) -> None:
        self._ids, self._rows, self._sample = ids[rows.index, rows.tokens], rows, sample
        self._items = (*rows.images, *rows.videos)

    def located(self, stream: Stream) -> Located:
        if stream in (Stream.PATCHES, Stream.EMBEDDINGS):
            return self._patches(stream)
        tokens = self._tokens()
        if stream is Stream.TOKENS:
            return tokens
        if stream is Stream.VISUAL:
            kept = tokens.index.image >= 0
            return self._placed(tokens.index[kept], torch.arange(self._rows.deepstack.start, self._rows.deepstack.stop))
        items = self._rows.images if stream is Stream.IMAGES else self._rows.videos
        none = torch.empty(0, dtype=torch.long)
        positions = torch.cat([none, *(item.positions - self._rows.tokens.start for item in items)])
        places = torch.cat([none, *(torch.arange(item.rows.start, item.rows.stop) for item in items)])
        return self._placed(tokens.index[positions], places)

    def _placed(self, index: RowIndex, places: torch.Tensor) -> Located:
        return Located(index, torch.full_like(places, self._rows.index), places)

    def _tokens(self) -> Located:
        count = len(self._ids)
        position = torch.arange(count)
        image, row, column = torch.full((3, count), -1)
        for number, item in enumerate(self._items):
            own = item.positions - self._rows.tokens.start
            _, rows, columns = item.place(torch.arange(len(item)))
            image[own], row[own], column[own] = number, torch.as_tensor(rows), torch.as_tensor(columns)
        index = RowIndex(torch.full_like(position, self._sample), position, self._ids, image, row, column)
        return self._placed(index, position + self._rows.tokens.start)

    def _patches(self, stream: Stream) -> Located:
        parts = list(self._patch_parts(stream))
        if not parts:
            none = torch.empty(0, dtype=torch.long)
            return Located(RowIndex(*(none for _ in COLUMNS)), none, none)
        places, image, row, column = (torch.cat(part) for part in zip(*parts, strict=True))
        position = torch.arange(len(places))
        index = RowIndex(
            torch.full_like(position, self._sample), position, torch.full_like(position, -1), image, row, column
        )
        return self._placed(index, places)

    def _patch_parts(self, stream: Stream) -> Iterator[tuple[torch.Tensor, ...]]:
        """Of each image and video: the rows of its patches in the stream, its number, their places in its grid."""
        for number, item in enumerate(self._items):
            item = _without_windows(item) if stream is Stream.EMBEDDINGS else item
            places = torch.arange(item.patches.start, item.patches.stop)
            _, row, column = (torch.as_tensor(part) for part in item.patch_place(places))
            yield places, torch.full_like(places, number), row, column


def _without_windows(item: ImageTokens) -> ImageTokens:
    return dataclasses.replace(item, blocks=torch.arange(len(item)))


# --- which rows are kept ---


def check_rows(select: Selection, sites: Sequence[Site]) -> None:
    """Refuse a choice that no row of a site can meet."""
    if not callable(select) and select not in _CHOICES:
        raise InputError(
            f"rows is {select!r}; give one of {', '.join(map(repr, _CHOICES))} or a function of a RowIndex"
        )
    for site in sites:
        if select in ("text", "last") and site.stream is not Stream.TOKENS:
            raise InputError(f"rows={select!r} keeps nothing of {site.name}, whose rows are {site.stream.value}")


def describe_rows(select: Selection) -> str:
    """A choice of rows as the manifest has it: a function by its name and a hash of its code, so that
    a resumed run with another one is refused."""
    if isinstance(select, str):
        return select
    code = getattr(select, "__code__", None)
    name = f"{getattr(select, '__module__', '')}.{getattr(select, '__qualname__', type(select).__qualname__)}"
    return f"{name} {_code_hash(code)}" if code is not None else name


def _code_hash(code: CodeType) -> str:
    """Of what a function does, not of where it stands."""
    constants = [_code_hash(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return hashlib.sha256(repr((code.co_code, constants, code.co_names)).encode()).hexdigest()[:16]


def _kept(located: Located, select: Selection, stream: Stream) -> Located:
    """The rows of one prompt that a choice keeps."""
    index = located.index
    if select == "all" or not len(located):
        return located
    if callable(select):
        kept = _checked(select(index), len(located))
    elif select == "last":
        kept = torch.tensor([len(located) - 1])
    else:
        kept = (index.image >= 0) == (select == "image")
    return Located(index[kept], located.prompts[kept], located.places[kept])


def _checked(kept: Any, count: int) -> torch.Tensor:
    """What a function of the caller gave: a mask of the rows, or their numbers."""
    kept = torch.as_tensor(kept, device="cpu")
    if kept.dtype == torch.bool and kept.shape != (count,):
        raise InputError(f"the function of rows= gave a mask of {list(kept.shape)} for {count} rows")
    if kept.dtype == torch.bool:
        return kept
    if not kept.numel():
        return kept.long().reshape(-1)
    if kept.is_floating_point() or kept.ndim != 1:
        raise InputError(f"the function of rows= gave {kept.dtype} {list(kept.shape)}; give a mask or indices")
    kept = kept.long()
    if not (-count <= int(kept.min()) and int(kept.max()) < count):
        raise InputError(f"the function of rows= gave index {int(kept.abs().max())}, and there are {count} rows")
    return kept
