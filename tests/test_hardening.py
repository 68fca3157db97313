"""What a hurried or unlucky script does to a trace: threads, signals, inference mode, missing images, leftovers."""

import gc
import pickle
import signal
import threading
import time
import weakref

import pytest
import torch

import vlscope

LONG = "The capital of France is" * 300


@pytest.fixture(scope="module")
def model():
    return vlscope.load("demo")


@pytest.fixture(scope="module")
def red():
    return vlscope.demo.picture("red", size=(64, 64))


def test_a_trace_that_another_thread_advances_says_so_and_nothing_breaks(model):
    outcomes = []

    def read(tracer, i):
        try:
            outcomes.append(tracer.layers[i].layer_output is not None)
        except vlscope.VlscopeError as error:
            outcomes.append(str(error))

    with model.trace(LONG) as tracer:
        threads = [threading.Thread(target=read, args=(tracer, i)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outcomes) == 6 and True in outcomes


def test_a_block_left_while_a_thread_computes_waits_for_it(model):
    clean = model("Hello").logits
    with pytest.raises(vlscope.VlscopeError, match="another thread"), model.trace(LONG) as tracer:
        thread = threading.Thread(target=lambda: tracer.layers[5].layer_output)
        thread.start()
        time.sleep(0.02)
        tracer.logits  # noqa: B018
    thread.join()
    assert torch.equal(model("Hello").logits, clean)


def test_a_signal_handler_cannot_read_the_trace_that_it_interrupts(model):
    caught = []

    def handler(*_):
        try:
            tracer.logits  # noqa: B018
        except vlscope.VlscopeError as error:
            caught.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with model.trace(LONG * 2) as tracer:
            signal.setitimer(signal.ITIMER_REAL, 0.06)
            out = tracer.layers[5].layer_output.save()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert out.shape[-1] == model.hidden_size
    assert all("advanced by another thread" in message for message in caught)


def test_saved_values_go_with_their_last_name_and_wait_for_no_collector(model):
    gc.disable()
    try:
        refs = []
        for _ in range(10):
            with model.trace("Hello") as tracer:
                logits = tracer.logits.save()
            refs.append(weakref.ref(logits))
        del tracer
        assert sum(ref() is not None for ref in refs) == 1
    finally:
        gc.enable()


def test_inference_tensors_can_be_assigned_and_skipped_with(model):
    clean = model("Hello").logits
    with torch.inference_mode(), model.trace("Hello"):
        zeros = model.layers[1].layer_output * 0
        model.layers[1].layer_output = zeros
        model.layers[3].skip(torch.zeros_like(zeros))
        edited = model.logits.save()
    with model.trace("Hello"):
        model.layers[1].layer_output[:] = 0
        model.layers[3].skip(torch.zeros(zeros.shape))
        expected = model.logits.save()
    assert torch.equal(edited, expected) and not torch.equal(edited, clean)


def test_a_missing_image_is_refused_by_its_index(model, red):
    with pytest.raises(vlscope.InputError, match="image 0 is None"):
        model("What is this?", images=[None])
    with pytest.raises(vlscope.InputError, match="image 1 is None"):
        model("What is this?", images=[red, None])


def test_a_module_that_gives_more_than_one_tensor_refuses_to_be_skipped(model, red):
    clean = model("What is this?", images=[red]).logits
    with model.trace("What is this?", images=[red]):
        for module in (model.vision, model.model, model.model.language_model, model.vision.rotary_pos_emb, model):
            with pytest.raises(vlscope.Unavailable, match="more than one tensor"):
                module.skip(torch.zeros(1, 1, 1))
        logits = model.logits.save()
    assert torch.equal(logits, clean)


@pytest.mark.parametrize("leaf", ["output", "layer_output"])
def test_the_gradient_reaches_whichever_alias_requires_it(model, red, leaf):
    with model.trace("What is this?", images=[red]):
        block = model.vision.layers[1]
        aliases = {"output": block.output, "layer_output": block.layer_output}
        aliases[leaf].requires_grad_()
        loss = model.logits[0, -1].max()
    loss.backward()
    assert aliases[leaf].grad is not None and aliases[leaf].grad.abs().sum() > 0


def test_a_result_pickles(model):
    with model.trace("Hello") as tracer:
        result = tracer.result
        copy = pickle.loads(pickle.dumps(result))
    assert torch.equal(copy.logits, result.logits)
