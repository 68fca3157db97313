"""Batches: padding, images of rows, and what belongs to which prompt."""

import pytest
import torch

import tiny
import vlscope

SHORT, LONG = list(range(20, 24)), list(range(40, 49))


def close(ours, expected, bound=1e-5):
    assert (ours.float() - expected.float()).abs().max() <= bound * expected.float().abs().max().clamp(min=1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bt_01_padded_rows_are_the_rows_alone_on_either_side(model, side):
    pad = [tiny.PAD] * 5
    row = pad + SHORT if side == "left" else SHORT + pad
    mask = [0] * 5 + [1] * 4 if side == "left" else [1] * 4 + [0] * 5
    batch = {"input_ids": torch.tensor([row, LONG]), "attention_mask": torch.tensor([mask, [1] * 9])}
    with model.trace(**batch):
        _, kwargs = model.model.language_model.inputs
        positions = kwargs["position_ids"]
        stream, logits = model.layers[2].layer_output.save(), model.logits.save()
    for index, ids in enumerate((SHORT, LONG)):
        kept = batch["attention_mask"][index].bool()
        # A shift of all positions would show nowhere else: the rotation tells only how far apart two tokens are.
        assert positions[:, index, kept].tolist() == [list(range(len(ids)))] * 3
        with model.trace(torch.tensor([ids])):
            close(stream[index, kept], model.layers[2].layer_output[0])
            close(logits[index, kept], model.logits[0])


def test_bt_01_generation_of_prompts_padded_on_the_right_is_refused(model):
    batch = {
        "input_ids": torch.tensor([SHORT + [tiny.PAD] * 5, LONG]),
        "attention_mask": torch.tensor([[1] * 4 + [0] * 5, [1] * 9]),
    }
    with pytest.raises(vlscope.InputError, match="Pad prompts on the left"), model.generate(**batch):
        pass


PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def pictures():
    """A small one and a large one."""
    return [vlscope.demo.picture(color, size=size) for color, size in (("red", (64, 64)), ("blue", (96, 64)))]


def test_bt_02_rows_of_any_number_of_images_are_the_rows_alone(model, pictures):
    small, large = pictures
    images = [[], [small], [large, small], [], [large]]
    worded = ["none", "one", "two", "still none", "last"]
    placed = ["none", f"{PLACE}one", f"{PLACE}two{PLACE}", "still none", f"la{PLACE}st"]
    flat = [image for own in images for image in own]
    for prompts, given in ((worded, images), (placed, images), (placed, flat)):
        together = model(prompts, images=given).logits
        for index, (prompt, own) in enumerate(zip(prompts, images, strict=True)):
            alone = model(prompt, images=own or None).logits[0]
            close(together[index, -len(alone) :], alone)


def test_bt_02_images_that_differ_from_the_places_of_a_row_are_refused_by_row_or_number(model, pictures):
    small, large = pictures
    with pytest.raises(vlscope.InputError, match="the 2 prompts hold 0 image placeholders, and 3 images"):
        model(["one", "two"], images=[small, large, small])
    with pytest.raises(vlscope.InputError, match="the 2 prompts hold 3 image placeholders, and 2 images"):
        model([f"{PLACE}a", f"{PLACE}{PLACE}b"], images=[small, large])
    for images, row, places, count in (([[small, large], [small]], 0, 1, 2), ([[small], [small]], 1, 2, 1)):
        with pytest.raises(vlscope.InputError, match=rf"prompt {row}: .*{places} image placeholder.*{count} image"):
            model([f"{PLACE}a", f"{PLACE}{PLACE}b"], images=images)
    with pytest.raises(vlscope.InputError, match="1 lists of images were passed for 2 prompts"):
        model([PLACE, PLACE], images=[[small, large]])


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_bt_05_a_batch_of_eight_is_each_alone_within_rounding_in_any_order(checkpoint, dtype, bound):
    run = vlscope.load(checkpoint("dense"), dtype=dtype)
    prompts = [f"picture {'x' * k}" for k in range(8)]
    images = [[vlscope.demo.picture("red", size=(32 * (2 + k % 3), 64))] for k in range(8)]
    together = run(prompts, images=images).logits[:, -1]
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    permuted = run([prompts[k] for k in order], images=[images[k] for k in order]).logits[:, -1]
    close(permuted, together[order], bound)
    for k in range(8):
        close(together[k], run(prompts[k], images=images[k]).logits[0, -1], bound)


def test_bt_07_the_rows_of_a_prompt_say_where_its_tokens_lie(model):
    batch = {
        "input_ids": torch.tensor([[tiny.PAD] * 5 + SHORT, LONG]),
        "attention_mask": torch.tensor([[0] * 5 + [1] * 4, [1] * 9]),
    }
    rows = model.prompt_rows(**batch)
    assert [row.tokens for row in rows] == [slice(5, 9), slice(0, 9)]
    with model.trace(**batch):
        mask = model.vision.image_token_mask.save()
        pattern = model.layers[1].self_attn.attention_probabilities.save()
        stream, logits = model.layers[1].layer_output.save(), model.logits.save()
    for index, (row, length) in enumerate(zip(rows, (4, 9), strict=True)):
        own = row.tokens
        assert batch["input_ids"][index, own].tolist() == (SHORT, LONG)[index]
        assert stream[index, own].shape == (length, 48) and logits[index, own].shape[0] == length
        assert mask[index, own].shape == (length,)
        assert pattern[index][:, own, own].shape == (4, length, length)
        torch.testing.assert_close(pattern[index][:, own, own].sum(-1), torch.ones(4, length))
