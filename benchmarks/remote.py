"""Engines in processes of their own, each with its own environment, asked for one run at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoints import CACHE

HERE = Path(__file__).resolve().parent
#: Module of engines -> the environment it needs (None: this one), made by peers.sh.
MODULES = {"ours": None, "with_hooks": None, "with_nnsight": "nnsight", "with_transformer_lens": "transformer-lens"}


class EngineError(RuntimeError):
    """An engine's process could not do what was asked."""


class Process:
    """A process of engines; `engines` maps each to the works that it can do."""

    def __init__(
        self, module: str, checkpoint: Path, inputs: Path, threads: int, variables: Mapping[str, str] | None = None
    ) -> None:
        self._name = module
        environment = MODULES[module]
        python = sys.executable if environment is None else str(CACHE / "peers" / environment / "bin" / "python")
        command = [python, str(HERE / "engines" / "serve.py"), module, str(checkpoint), str(inputs), str(threads)]
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), **(variables or {})}
        if environment is not None:
            variables.pop("PYTHONPATH", None)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=variables
        )
        self.engines: Mapping[str, list[str]] = self._answer()["engines"]

    def ask(self, engine: str, work: str, keep: Path | None = None, peak: bool = False) -> dict[str, Any]:
        """What one run tells; see `engines/serve.py`."""
        assert self._child.stdin is not None
        request = {"engine": engine, "work": work, "keep": None if keep is None else str(keep), "peak": peak}
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._log.seek(0)
            raise EngineError(f"{self._name} ended with status {self._child.returncode}: {self._log.read()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self._name}: {answer['error']}\n{answer['traceback']}")
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
        self._log.close()


@dataclasses.dataclass(frozen=True)
class RemoteWork:
    """A work of an engine in its process."""

    process: Process
    engine: str
    work: str

    def time(self) -> float:
        return self.process.ask(self.engine, self.work)["us"]

    def deliver(self) -> list[torch.Tensor]:
        """What one run delivers."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tensors.pt"
            self.process.ask(self.engine, self.work, path)
            return torch.load(path)


def installed(module: str) -> bool:
    environment = MODULES[module]
    return environment is None or (CACHE / "peers" / environment / ".done").exists()


@contextmanager
def started(
    modules: Sequence[str],
    checkpoint: Path,
    inputs: Mapping[str, Any],
    threads: int,
    variables: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """The processes of these modules, ready and ended with the block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "inputs.pt"
        torch.save(dict(inputs), path)
        processes = []
        for module in modules:
            process = Process(module, checkpoint, path, threads, variables)
            stack.callback(process.close)
            processes.append(process)
        yield processes
