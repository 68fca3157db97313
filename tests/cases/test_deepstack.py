"""DeepStack: what is added where, when it is reached, and what is refused."""
# ruff: noqa: B018 - an attribute that is read and dropped is what some of these tests are about

import shutil

import pytest
import torch

import tiny
import vlscope
from checkpoint_folders import configure


def test_ds_01_each_level_is_added_at_the_image_tokens_and_moves_the_logits(model, checkpoint, image):
    for k in range(2):
        with model.trace(**image):
            mask, out = model.vision.image_token_mask, model.layers[k].layer_output
            added, after = model.layers[k].deepstack_output, model.layers[k + 1].input
            assert torch.equal(after[mask], out[mask] + added) and added.abs().max() > 0.1
            assert torch.equal(after[~mask], out[~mask])
    tripled = vlscope.load(checkpoint("dense"))
    for merger in tripled.vision.deepstack_merger_list:
        merger.linear_fc2.weight.mul_(3)
    assert (tripled(**image).logits - model(**image).logits).abs().max() > 0.1


@pytest.mark.parametrize("grad", [False, True])
def test_ds_02_a_saved_block_output_is_the_one_before_the_add(model, image, grad):
    def read(*sites):
        with model.trace(**image):
            if grad:
                model.token_embeddings.requires_grad_()
            return [model.get(site).save() for site in sites]

    together = read("layers.0.layer_output", "layers.1.input")
    alone = read("layers.0.layer_output") + read("layers.1.input")
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other) and one.requires_grad == grad
    mask = image["input_ids"] == tiny.IMAGE
    assert not torch.equal(together[0][mask], together[1][mask])
    assert torch.equal(together[0][~mask], together[1][~mask])


@pytest.mark.parametrize("taps, said", [([1, 7], "7"), ([-1], "-1"), ([4], "4"), ([2, 2], "repeats block 2")])
def test_ds_04_a_tap_of_no_block_is_refused_at_load(checkpoint, tmp_path, taps, said):
    folder = shutil.copytree(checkpoint("dense"), tmp_path / "model")
    configure(folder, lambda config: config["vision_config"].update(deepstack_visual_indexes=taps))
    with pytest.raises(vlscope.ConfigError, match=rf"vision_config\.deepstack_visual_indexes\[\d\].*{said}") as caught:
        vlscope.load(folder)
    assert "repeats" in said or "4 blocks" in str(caught.value) or "from 0" in str(caught.value)


def test_ds_06_a_merger_reads_the_output_of_the_block_that_it_names(model, image):
    for merger, block in enumerate((0, 2)):
        with model.trace(**image):
            out = model.vision.layers[block].layer_output[0].clone()
            read = model.vision.deepstack_merger_list[merger].input
            assert torch.equal(read.reshape(out.shape), out)


def test_ds_08_the_stream_keeps_its_dtype_and_the_sum_is_rounded_once(checkpoint, image):
    model = vlscope.load(checkpoint("dense"), dtype=torch.bfloat16)
    with model.trace(**image):
        mask = model.vision.image_token_mask
        for k in range(2):
            out, added = model.layers[k].layer_output, model.layers[k].deepstack_output
            after = model.layers[k + 1].input
            assert out.dtype == added.dtype == after.dtype == torch.bfloat16
            assert torch.equal(after[mask], (out[mask].float() + added.float()).bfloat16())
        assert model.layers[3].input.dtype == model.logits.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["one_image", "padded_mixed"])
def test_ds_09_a_level_is_reached_on_the_prompt_alone(model, inputs, case):
    given = inputs("dense", case)
    reached = []
    with model.generate(**given, max_new_tokens=3, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            try:
                reached.append(model.layers[0].deepstack_output.shape)
            except vlscope.NotReachedError as error:
                assert "layers.0.deepstack_output is not reached" in str(error)
                reached.append(step)
    assert reached == [(int((given["input_ids"] == tiny.IMAGE).sum()), 48), 1, 2]
    ids, mask = given["input_ids"], given["attention_mask"]
    for _ in range(3):
        tokens = model(**{**given, "input_ids": ids, "attention_mask": mask}).logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens)], 1)
    assert torch.equal(tracer.result, ids)


def test_ds_10_a_prompt_is_one_piece_however_long(model, reference_model):
    """The prompt of a generation and that of a trace, an image in the middle of 3,000 tokens."""
    ids = torch.arange(3000)[None] % 500
    ids[0, 1500:1508] = tiny.IMAGE
    ids[0, 1499], ids[0, 1508] = tiny.VISION_START, tiny.VISION_END
    pixels = torch.rand(32, 1536, generator=torch.Generator().manual_seed(0)) * 2 - 1
    given = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]])}
    with torch.no_grad():
        theirs = reference_model("dense", "sdpa")(
            **given, mm_token_type_ids=(ids == tiny.IMAGE).int(), logits_to_keep=1
        )
    with model.trace(**given, logits_to_keep=1):
        level, after = model.layers[0].deepstack_output.save(), model.layers[1].input.save()
        last = model.logits.save()
    assert level.shape == (8, 48) and torch.equal(last, theirs.logits)
    with model.generate(**given, max_new_tokens=2, eos_token_id=[]) as tracer:
        for _ in tracer.iter[0]:
            assert torch.equal(model.layers[0].deepstack_output, level)
            assert torch.equal(model.layers[1].input, after)


def test_ds_12_a_level_that_is_not_there_is_an_error_and_no_zeros(model, text, image):
    plain = model(**text).logits
    with model.trace(**text):
        with pytest.raises(vlscope.NotReachedError, match=r"layers\.0\.deepstack_output is not reached: .*no image"):
            model.layers[0].deepstack_output.save()
        assert torch.equal(model.logits, plain)
    with model.trace(**image), pytest.raises(vlscope.Unavailable, match="2 DeepStack levels.*block 3 has none"):
        model.layers[3].deepstack_output.save()
    assert torch.equal(model(**text).logits, plain)
