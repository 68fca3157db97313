"""Keep activations of many prompts on disk.

DATA is a JSONL file: a line is {"prompt": "...", "images": ["red.png", ...]} or {"messages": [...]}, and relative paths
are relative to the file. What is written: DIR/SITE/shard-i-of-N/part-*.safetensors, and a manifest for each
shard. The same command again goes on where the last one ended. `vlscope collect merge DIR` checks that a
collection is whole and puts the statistics of its shards together.

Examples:
  vlscope collect demo --data prompts.jsonl --site layers.3.layer_output --rows image --out acts
  vlscope collect Qwen/Qwen3-VL-4B-Instruct --data prompts.jsonl --site 'layers.*.layer_output' --rows last \\
      --batch-size 8 --dtype float16 --device cuda --out acts
  seq 0 3 | xargs -P4 -I{} vlscope collect demo --data prompts.jsonl --site logits --shard {}/4 --out acts
  srun --ntasks 16 sh -c 'vlscope collect MODEL --data ... --shard $SLURM_PROCID/$SLURM_NTASKS --out acts'
  vlscope collect merge acts
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import common

_MERGE = "merge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help='a checkpoint folder, a hub id, or "demo"; or "merge"')
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="after merge: the collection")
    what = parser.add_argument_group("what is collected")
    what.add_argument("--data", type=Path, metavar="FILE", help="the prompts, a JSONL file")
    what.add_argument("--site", nargs="+", action="extend", metavar="SITE", help="sites or patterns")
    what.add_argument("--out", type=Path, metavar="DIR", help="where it goes")
    what.add_argument(
        "--rows",
        choices=("all", "image", "text", "last"),
        default="all",
        help="which tokens or patches are kept (default: all)",
    )
    what.add_argument("--dtype", metavar="DTYPE", help="of the stored rows, e.g. float16; as computed by default")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--batch-size", type=int, default=1, metavar="B", help="prompts to a forward (default: 1)")
    how.add_argument("--shard", metavar="i/N", help="only the samples k with k mod N = i (default: 0/1)")
    how.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do about a sample that cannot be run (default: stop)",
    )
    how.add_argument("--backend", choices=("local", "ray"), default="local", help="ray: shards are tasks of a cluster")
    how.add_argument("--shards", type=int, metavar="N", help="of --backend ray: how many")
    how.add_argument("--device", default="cpu", help='"cpu" (the default) or "cuda"')
    how.add_argument("--model-dtype", metavar="DTYPE", help="convert the weights, e.g. float32; as stored by default")
    common.add_weights(how)
    common.add_attention(how)
    merging = parser.add_argument_group("merge")
    merging.add_argument("--hashes", action="store_true", help="also read every byte and compare its hash")


def run(arguments: argparse.Namespace) -> None:
    if arguments.model == _MERGE:
        _merge(arguments)
    else:
        _collect(arguments)


def _merge(arguments: argparse.Namespace) -> None:
    from ..collection import merge
    from ..errors import InputError

    if arguments.folder is None:
        raise InputError("give the collection: vlscope collect merge DIR (a model in a folder merge is ./merge)")
    merged = merge(arguments.folder, hashes=arguments.hashes)
    print(f"{merged.samples:,} samples, {len(merged.skipped):,} of them skipped")
    for site, rows in merged.rows.items():
        print(f"{site}: {rows:,} rows")
    _print_skipped(merged.skipped)


def _collect(arguments: argparse.Namespace) -> None:
    from ..collection import collect
    from ..errors import InputError
    from ..model import load

    missing = [f"--{name}" for name in ("data", "site", "out") if not getattr(arguments, name)]
    if missing or arguments.folder is not None:
        said = f"give {', '.join(missing)}" if missing else f"{arguments.folder} is no option: give the folder by --out"
        raise InputError(f"{said}; `vlscope collect --help` shows how it is called")
    if arguments.shard and arguments.backend == "ray":
        raise InputError("--shard is for one process of several; with --backend ray give --shards N")
    model = load(
        arguments.model,
        dtype=arguments.model_dtype,
        device=arguments.device,
        attn_implementation=arguments.attention,
        weights=arguments.weights,
        dispatch=False,
    )
    found = collect(
        model,
        arguments.data,
        arguments.site,
        arguments.out,
        rows=arguments.rows,
        dtype=arguments.dtype,
        batch_size=arguments.batch_size,
        shard=arguments.shard or (0, 1),
        on_error=arguments.on_error,
        backend=arguments.backend,
        shards=arguments.shards,
    )
    for one in found if isinstance(found, list) else [found]:
        index, count = one.shard
        print(f"shard {index}/{count}: {one.samples:,} samples, {sum(one.rows.values()):,} rows in {one.out}")
        _print_skipped(one.skipped)


def _print_skipped(skipped: tuple[tuple[int, str], ...]) -> None:
    for sample, message in skipped:
        print(f"skipped sample {sample}: {message}")
