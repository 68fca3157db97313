"""Shards as tasks of a local cluster of two workers.

The test runs in a pytest of its own: Ray ends the whole process, without a word, where one of its own checks fails,
as "Tried to complete task that was not pending" of Ray 2.49 sometimes does after a worker was killed.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import vlscope

from .samples import stored, text_prompts

ray = pytest.importorskip("ray")

collect = functools.partial(vlscope.collect, progress=False)
SITE = "layers.3.layer_output"
CHILD = "VLSCOPE_TEST_RAY"  # set in the pytest that runs the test itself
ATTEMPTS = 3  # of that pytest, where Ray ended it: what is asserted is never tried twice


@pytest.fixture(scope="module")
def cluster():
    """Two workers, which find the package where this process does."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # this file is nowhere on their path
    packages = os.pathsep.join([str(Path(vlscope.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # many processes, which import the same
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=80 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}},
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


class DeadlyOnce:
    """A dataset that kills the worker that reads its 20th sample, the first time."""

    def __init__(self, samples, marker):
        self._samples, self._marker = samples, marker

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        if index == 20 and not self._marker.exists():
            while not any(self._marker.parent.glob("out/shard-0-of-2.json")):
                time.sleep(0.01)
            self._marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return self._samples[index]


def test_a_worker_killed_in_mid_run_is_started_again_and_goes_on_and_the_rows_are_those_of_one_process(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_in_its_own_process"]
    for attempt in range(ATTEMPTS):
        where = f"--basetemp={tmp_path / str(attempt)}"
        child = subprocess.run([*command, where], env={**os.environ, CHILD: "1"}, capture_output=True, text=True)
        if re.search(r"\d+ (passed|failed|error)", child.stdout):
            break
    assert child.returncode == 0, child.stdout + child.stderr
    assert "1 passed" in child.stdout


@pytest.mark.skipif(CHILD not in os.environ, reason="run by the test before it")
def test_in_its_own_process(cluster, model, tmp_path):
    data = text_prompts(40)
    collect(model, data, SITE, tmp_path / "one")
    marker = tmp_path / "killed"
    deadly = DeadlyOnce(data, marker)
    done = collect(model, deadly, SITE, tmp_path / "out", backend="ray", shards=2, part_bytes=4_000)
    assert int(marker.read_text()) != os.getpid(), "a worker was killed"
    assert [one.shard for one in done] == [(0, 2), (1, 2)] and sum(one.samples for one in done) == 40
    merged = vlscope.collection.merge(tmp_path / "out", hashes=True)
    one = stored(tmp_path / "one")
    assert merged.rows[SITE] == len(one["sample"])
    for name, column in stored(tmp_path / "out").items():
        assert torch.equal(column, one[name]), name
    with pytest.raises(vlscope.CollectionError, match="rows is 'last' here"):
        collect(model, deadly, SITE, tmp_path / "out", backend="ray", shards=2, rows="last")
    with pytest.raises(vlscope.InputError, match="edits that stand"), model.edit("layers.0.layer_output", torch.zero_):
        collect(model, data, SITE, tmp_path / "edited", backend="ray", shards=2)
    shutil.rmtree(tmp_path / "out")
