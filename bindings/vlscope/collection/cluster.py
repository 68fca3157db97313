"""Shards as tasks of a Ray cluster.

A task loads the model on its node and collects one shard, as a process of its own would. When its
worker dies, Ray starts the task again, and the shard's manifest tells it where to go on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CollectionError, InputError
from .dataset import Shard
from .identity import model_identity
from .manifest import Manifest, differences, path_of

if TYPE_CHECKING:
    from ..model import StandardizedTransformer
    from .collector import Collected, Options

__all__ = ["collect_on_ray"]

_RETRIES = 10  # of a task whose worker died
_POLL = 1.0  # seconds between looks at the manifests


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How a task gets the model, and what tells that it is the same."""

    path: str
    options: Mapping[str, Any]
    identity: Mapping[str, Any]

    @classmethod
    def of(cls, model: StandardizedTransformer) -> _Recipe:
        from ..processing import Processor

        if model.edits:
            keys = ", ".join(edit.key for edit in model.edits)
            raise InputError(
                f"the model has edits that stand ({keys}), and a task loads a model of its own: make them in a script "
                'that collects one shard, with shard="i/N"'
            )
        if model._core.weight_version():
            raise InputError("weights were edited in memory, and a task loads the folder: save them as a checkpoint")
        options = {
            "task": model.task,
            "dtype": model.dtype,
            "device": model.device.type,
            "attn_implementation": model.attn_implementation,
            "weights": model.weights,
            "patch_embedding": model.patch_embedding,
            "dispatch": False,
        }
        if not isinstance(model.processor, (Processor, type(None))):
            options["processor"] = model.processor
        model.dispatch()
        return cls(os.path.abspath(model.folder), options, model_identity(model))

    def load(self) -> StandardizedTransformer:
        from ..model import load

        model = load(self.path, **self.options)
        model.dispatch()
        if lines := differences(model_identity(model), self.identity):
            raise CollectionError(f"{self.path} gives another model in a task: {'; '.join(lines)}")
        return model


def _work(recipe: _Recipe, dataset: Any, out: Path, shard: Shard, options: Options) -> Collected:
    """One task."""
    from .collector import collect_shard

    return collect_shard(recipe.load(), dataset, out, shard, options)


def collect_on_ray(
    model: StandardizedTransformer,
    dataset: Any,
    out: Path,
    shards: int | None,
    options: Options,
    ray_options: Mapping[str, Any],
) -> list[Collected]:
    """Every shard as a task; waits for all of them."""
    try:
        import ray
    except ImportError:
        raise InputError('backend="ray" needs Ray, the extra of vlscope: pip install "vlscope[ray]"') from None
    recipe = _Recipe.of(model)
    if not ray.is_initialized():
        _connect(ray)
    count = _shards(ray, model, shards)
    resources = {"num_gpus": 1} if model.device.type == "cuda" else {}
    task = ray.remote(_work).options(**{"max_retries": _RETRIES, **resources, **ray_options})
    given = str(Path(dataset).absolute()) if isinstance(dataset, (str, os.PathLike)) else ray.put(dataset)
    quiet = dataclasses.replace(options, progress=False)
    tasks = [task.remote(recipe, given, out.absolute(), Shard(index, count), quiet) for index in range(count)]
    try:
        _watch(ray, tasks, out, count, options.progress)
        return list(ray.get(tasks))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise CollectionError(f"a task on Ray was lost: {error}. The same call goes on from what is stored.") from error
    finally:
        for running in tasks:  # of the others, where one failed; no matter for those that are done
            ray.cancel(running, force=True)


def _connect(ray: Any) -> None:
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        raise InputError(
            'backend="ray" runs on an existing cluster, and none was found: start one ("ray start --head"), name it by '
            "RAY_ADDRESS, or call ray.init() first"
        ) from None


def _shards(ray: Any, model: StandardizedTransformer, shards: int | None) -> int:
    """How many tasks: as asked for, else one to a GPU or to a node."""
    if shards is not None:
        if shards < 1:
            raise InputError(f"shards is {shards}; give 1 or more")
        return shards
    if model.device.type == "cuda":
        return max(1, int(ray.cluster_resources().get("GPU", 0)))
    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))


def _watch(ray: Any, tasks: Sequence[Any], out: Path, count: int, progress: bool) -> None:
    """Wait for all tasks or for one that fails, with a progress bar that the manifests move."""
    from tqdm import tqdm

    waiting = list(tasks)
    with tqdm(unit="sample", disable=None if progress else True, leave=False) as bar:
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=_POLL)
            for task in ended:
                ray.get(task)
            if not bar.disable:
                bar.update(_through(out, count) - bar.n)


def _through(out: Path, count: int) -> int:
    """Samples that are stored, over all shards."""
    paths = (path_of(out, Shard(index, count)) for index in range(count))
    return sum(Manifest.load(path).done for path in paths if path.exists())
