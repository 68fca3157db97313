"""One process of engines, asked for one run at a time, so that engines with environments of their own can
still be interleaved. Started by `remote.Process` with the environment's own Python:

    python serve.py MODULE CHECKPOINT INPUTS THREADS

`MODULE.engines(checkpoint, inputs)` gives the engines by name; their methods named in `WORKS` each do one
run of a work and return the tensors that it delivered. A request is a line of JSON, `{"engine": "ours",
"work": "nothing", "keep": null, "peak": false}`; the answer holds the microseconds of the run, and with
`keep` the tensors lie in that file. With `peak` the work is run twice, and the answer holds the bytes by
which the second run's peak exceeded what the process held before it, and those that it delivered.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKS = (
    "nothing",
    "last_logits",
    "one_value",
    "every_layer",
    "every_vision_block",
    "last_rows",
    "pattern",
    "zeroed",
    "layer_sweep",
    "position_sweep",
)
LONG_US = 100_000


def resident(name: str) -> int:
    """Bytes: `VmRSS`, or since the last reset its peak `VmHWM`."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak(work: Callable[[], list[Any]]) -> dict[str, Any]:
    work()  # every weight is in memory now, and every buffer that is made once
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
    delivered = work()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in delivered}
    return {"peak": resident("VmHWM") - before, "delivered": sum(storages.values())}


def run(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    work = getattr(engine, request["work"])
    if request["peak"]:
        return peak(work)
    start = time.perf_counter()
    delivered = work()
    us = (time.perf_counter() - start) * 1e6
    if request["keep"]:
        import torch

        torch.save([tensor.detach().clone() for tensor in delivered], request["keep"])
    del delivered
    if us > LONG_US:
        gc.collect()  # off the clock, and only where a run is long beside it
    return {"us": us}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not come between the answers

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        module, checkpoint, inputs, threads = sys.argv[1:]
        import torch

        torch.set_num_threads(int(threads))
        torch.set_grad_enabled(False)
        engines = importlib.import_module(module).engines(Path(checkpoint), torch.load(inputs))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    able = {name: [work for work in WORKS if getattr(engine, work, None)] for name, engine in engines.items()}
    answer({"engines": able})
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(run(engines[request["engine"]], request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})


if __name__ == "__main__":
    main()
