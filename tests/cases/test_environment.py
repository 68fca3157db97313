"""The process around a model: signals, copies, threads, forks, imports and thread numbers."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import asyncio
import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import vlscope
from vlscope import _core

PACKAGE = Path(vlscope.__file__).parents[1]


def run(*arguments, cwd=None, **environment):
    """What an interpreter prints that is started with `arguments`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def python(code, *flags, **options):
    return run(*flags, "-c", code, **options)


INTERRUPTED = """
import os, signal, threading, torch, vlscope
torch.set_num_threads(1)
model = vlscope.load("demo")
plain = model("hi").logits
ids = torch.arange(6000)[None] % 300

def prefill():
    while True:
        model(ids)

def traced():
    while True:
        with model.trace(ids):
            model.logits

def generate():
    model.generate("hi", max_new_tokens=100000, eos_token_id=[]).result

def load():
    while True:
        vlscope.load("demo")

def interrupt(taken):
    # Python drops an interrupt that comes while a destructor runs; a user presses the keys again.
    while not taken.wait(0.3):
        os.kill(os.getpid(), signal.SIGINT)

for run in (prefill, traced, generate, load):
    taken = threading.Event()
    threading.Thread(target=interrupt, args=(taken,), daemon=True).start()
    try:
        run()
    except KeyboardInterrupt:
        taken.set()
        print(run.__name__)
    assert torch.equal(model("hi").logits, plain)
"""


def test_en_01_an_interrupt_ends_a_load_a_forward_and_a_generation_and_the_model_works_on():
    """Within a block's work: the time is bounded by that, and no test holds it."""
    assert python(INTERRUPTED).split() == ["prefill", "traced", "generate", "load"]


LET_IN = """
import signal, torch, vlscope
torch.set_num_threads(1)
model = vlscope.load("demo")
ids = torch.arange(6000)[None] % 300
plain = model("hi").logits

def handler(*_):
    try:
        tracer.logits
    except vlscope.VlscopeError as error:
        assert "advanced by another thread" in str(error)
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
try:
    for _ in range(30):
        with model.trace(ids) as tracer:
            tracer.logits
    print("ran to its end each time")
except KeyboardInterrupt:
    print("interrupted")
signal.setitimer(signal.ITIMER_REAL, 0)
assert torch.equal(model("hi").logits, plain)
"""


def test_en_01_it_is_the_forward_that_lets_an_interrupt_in():
    """A handler that runs while the forward is under way cannot read from its trace; one that runs behind it can."""
    assert python(LET_IN).strip() == "interrupted"


def test_en_03_a_model_or_a_part_of_it_is_neither_pickled_nor_copied(model, text):
    with model.trace(**text) as tracer:
        for thing in (model, model.layers[0], model.layers, model.vision, tracer, tracer.layers[0]):
            for act in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=r"cannot be (copied or )?pickled|vlscope\.load"):
                    act(thing)


def test_en_03_what_was_saved_and_every_error_pickles(model, text):
    with model.trace(**text):
        value = model.layers[0].layer_output.save()
    assert torch.equal(pickle.loads(pickle.dumps(value)), value) and torch.equal(copy.deepcopy(value), value)
    for name in vlscope.errors.__all__:
        error = pickle.loads(pickle.dumps(getattr(vlscope, name)("said")))
        assert type(error) is getattr(vlscope, name) and str(error) == "said"


@pytest.mark.parametrize("name", ["Trace", "Model", "Site", "Value", "Field", "Kind", "Inputs", "Recording"])
def test_en_03_a_bound_object_without_its_content_cannot_be_made(name):
    kind = getattr(_core, name)
    with pytest.raises(TypeError, match=name):
        kind.__new__(kind)


def test_en_03_a_model_that_was_never_initialised_says_so():
    class Unfinished(vlscope.StandardizedTransformer):
        def __init__(self):
            pass

    for raw in (vlscope.StandardizedTransformer.__new__(vlscope.StandardizedTransformer), Unfinished()):
        for act in (lambda raw=raw: raw.trace("x"), lambda raw=raw: raw.layers, lambda raw=raw: raw.logits):
            with pytest.raises((TypeError, AttributeError)):
                act()


def test_en_04_threads_tasks_and_callbacks_get_what_each_would_alone(model, vlscope_model, text, image):
    other = vlscope_model("ungrouped")

    def run(which, given, edit):
        with which.trace(**given):
            if edit:
                which.layers[1].layer_output[:] = 0
            return which.logits.clone()

    jobs = [(model, text, False), (model, image, True), (other, text, True)]
    alone = [run(*job) for job in jobs]
    wrong = []

    def work(k):
        for _ in range(100):
            if not torch.equal(run(*jobs[k]), alone[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    async def task(k):
        which, given, edit = jobs[k]
        with which.trace(**given):
            await asyncio.sleep(0)
            if edit:
                which.layers[1].layer_output[:] = 0
            await asyncio.sleep(0)
            return which.logits.clone()

    async def both():
        return await asyncio.gather(*(task(k) for k in range(3)))

    assert all(torch.equal(a, b) for a, b in zip(asyncio.run(both()), alone, strict=True))
    with model.edit("layers.0.layer_output", lambda value: run(*jobs[2]) is None):
        pass
    inner = []
    with model.edit("layers.0.layer_output", lambda value: inner.append(run(*jobs[2]))):
        assert torch.equal(run(*jobs[0]), alone[0])
    assert torch.equal(inner[0], alone[2])


def test_a_forked_and_a_spawned_child_run_a_model(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(
        "import multiprocessing, torch, vlscope\n"
        "torch.set_num_threads(1)\n"
        "def work(queue, model=None):\n"
        "    torch.set_num_threads(1)\n"
        "    model = model or vlscope.load('demo')\n"
        "    with model.trace('hi'):\n"
        "        queue.put(model.logits.sum().item())\n"
        "if __name__ == '__main__':\n"
        "    model = vlscope.load('demo')\n"
        "    for method, given in (('fork', (model,)), ('spawn', ())):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        child = context.Process(target=work, args=(queue, *given))\n"
        "        child.start()\n"
        "        assert queue.get(timeout=60) == model('hi').logits.sum().item()\n"
        "        child.join()\n"
        "        assert child.exitcode == 0\n"
        "        print(method)\n"
    )
    assert run(script).split() == ["fork", "spawn"]


def test_en_06_a_file_that_hides_torch_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("")
    code = (
        "import sys; sys.path.insert(0, '.')\ntry:\n    import vlscope\nexcept ImportError as error:\n    print(error)"
    )
    said = python(code, cwd=tmp_path)
    assert "torch.py" in said and "hides" in said


def test_en_06_another_torch_than_the_one_it_was_built_for_is_refused_naming_both(tmp_path):
    code = """
import torch
torch.__version__ = "2.1.0"
try:
    import vlscope
except ImportError as error:
    print(error)
"""
    said = python(code)
    assert "2.1.0" in said and "torch 2.11" in said


@pytest.mark.parametrize(
    "imports, threads",
    [("vlscope, torch, numpy", "1"), ("numpy, torch, vlscope", "64")],
)
def test_en_08_imports_in_any_order_give_equal_values_without_a_warning(imports, threads):
    code = f"""
import {imports}
import torch
before = torch.get_num_threads()
model = vlscope.load("demo")
assert torch.get_num_threads() == before
torch.set_num_threads(1)
print(repr(model("hi").logits.double().sum().item()))
"""
    said = python(code, "-X", "dev", "-W", "error", OMP_NUM_THREADS=threads)
    assert said == f"{vlscope.load('demo')('hi').logits.double().sum().item()!r}\n"
