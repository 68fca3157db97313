"""Generation: positions, ends, settings and steps, as the cases count them."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import json
import shutil

import pytest
import torch

import tiny
import vlscope
from vlscope.verify.prompts import WIDE


@pytest.fixture(scope="module")
def wide():
    """`a VS I*8 VE b` with the grid (1, 4, 8): 12 tokens whose largest position is 7."""
    row = [7, tiny.VISION_START, *[tiny.IMAGE] * 8, tiny.VISION_END, 9]
    pixels = torch.rand(32, 1536, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return {"input_ids": torch.tensor([row]), "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]])}


def greedy_by_full_traces(model, inputs, count, **options):
    """Tokens and last logits of `count` steps, each a trace of all ids so far."""
    ids, mask, rows = inputs["input_ids"], inputs.get("attention_mask"), []
    for _ in range(count):
        given = {**inputs, "input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
        rows.append(model(**given).logits[:, -1])
        ids = torch.cat([ids, rows[-1].argmax(-1, keepdim=True)], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return ids, rows


def generated(model, inputs, **options):
    return model.generate(**inputs, **{"max_new_tokens": 4, "eos_token_id": [], **options}).result


def test_gn_01_the_positions_of_new_tokens_go_on_from_the_largest_of_the_prompt(model, wide):
    ids, rows = greedy_by_full_traces(model, wide, 6)
    positions = []
    with model.generate(**wide, max_new_tokens=6, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            args, kwargs = model.model.language_model.rotary_emb.inputs
            positions.append({**kwargs}.get("position_ids", args[-1]))
            torch.testing.assert_close(model.logits[:, -1], rows[step], rtol=1e-5, atol=1e-5)
    assert torch.equal(tracer.result, ids) and positions[0].max() == 7
    for step, seen in enumerate(positions[1:]):
        assert (seen == 8 + step).all() and seen.numel() == 3


def test_gn_02_every_end_token_of_the_generation_config_ends_a_row_and_is_part_of_it(model, tmp_path, text):
    free = generated(model, text, max_new_tokens=5)[0, 9:].tolist()
    second = next(k for k in range(1, 5) if free[k] not in free[:k])

    def loaded(name, setting, config=None):
        folder = shutil.copytree(model.folder, tmp_path / name)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if setting is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": setting}))
        if config is not None:
            stored = json.loads((folder / "config.json").read_text())
            stored["text_config"]["eos_token_id"] = config
            (folder / "config.json").write_text(json.dumps(stored))
        return vlscope.load(folder)

    def ends(run, **options):
        return run.generate(**text, max_new_tokens=5, **options).new_tokens[0].tolist()

    listed = loaded("list", [tiny.IM_END, free[second]])
    assert ends(listed) == free[: second + 1]
    assert ends(loaded("int", free[second])) == free[: second + 1]
    assert ends(loaded("absent", None, free[second])) == free[: second + 1]
    assert ends(listed, eos_token_id=free[0]) == free[:1] and ends(listed, eos_token_id=[]) == free
    assert generated(model, text, max_new_tokens=1).shape == (1, 10)
    with pytest.raises(vlscope.InputError, match="max_new_tokens is 0"):
        model.generate(**text, max_new_tokens=0)


def test_gn_02_an_end_token_forced_at_a_step_ends_the_generation_there(model, text):
    ends = [tiny.IM_END, 11]
    with model.generate(**text, max_new_tokens=8, eos_token_id=ends) as tracer:
        for step in tracer.iter[:]:
            model.logits[..., ends] = -1e9
            if step == 2:
                model.logits[..., 11] = 1e9
    assert tracer.new_tokens.shape == (1, 3) and tracer.new_tokens[0, -1] == 11


def test_gn_04_a_generation_leaves_nothing_to_the_next(model, vlscope_model, checkpoint, inputs):
    names = ["one_image", "text", "two_images", "padded_mixed"]
    in_turn = [generated(model, inputs("dense", name)) for name in names]
    for name, tokens in zip(names, in_turn, strict=True):
        assert torch.equal(generated(vlscope.load(checkpoint("dense")), inputs("dense", name)), tokens)


@pytest.mark.parametrize("option", ["num_beams", "num_return_sequences"])
def test_gn_06_beams_and_several_sequences_are_refused_by_name(model, image, option):
    with pytest.raises(TypeError, match=f"{option}.*one sequence"):
        model.generate(**image, **{option: 2})


def test_gn_06_a_batch_of_one_and_two_images_is_each_row_alone(model, inputs):
    batch = inputs("dense", "padded_mixed")
    ids, _ = greedy_by_full_traces(model, batch, 3)
    assert torch.equal(generated(model, batch, max_new_tokens=3), ids)


def test_gn_07_greedy_whatever_the_file_says_and_a_seed_repeats(model, tmp_path, text):
    folder = shutil.copytree(model.folder, tmp_path / "sampling")
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tiny.IM_END, **settings}))
    run = vlscope.load(folder)
    plain = generated(model, text)
    assert torch.equal(generated(run, text), plain) and torch.equal(generated(run, text, do_sample=False), plain)
    drawn = [generated(run, text, do_sample=True, seed=3) for _ in range(2)]
    assert torch.equal(*drawn)
    others = {tuple(generated(run, text, do_sample=True, seed=seed)[0].tolist()) for seed in range(8)}
    assert len(others) > 1  # it is drawn, and the seed is what repeats it
    penalised = model.generate(**text, max_new_tokens=1, eos_token_id=[], repetition_penalty=1e9).new_tokens
    assert penalised.item() not in text["input_ids"]  # the penalty covers the prompt's ids


def test_gn_09_an_end_before_the_last_step_asked_for_keeps_what_was_saved_and_says_so(model, text):
    def forced(tracer, steps):
        kept = []
        for step in steps:
            kept.append(model.layers[1].layer_output.save())
            model.logits[:] = -1e9
            model.logits[..., 11 if step == 3 else 12] = 1e9
        return kept

    with model.generate(**text, max_new_tokens=10, eos_token_id=11) as tracer:
        assert len(forced(tracer, tracer.iter[:])) == 4
    with pytest.raises(vlscope.NotReachedError, match="ended after 4 steps"):  # noqa: SIM117
        with model.generate(**text, max_new_tokens=10, eos_token_id=11) as tracer:
            forced(tracer, tracer.iter[:10])
    assert len(tracer.saved["layers.1.layer_output"]) == 4
    with model.generate(**text, max_new_tokens=10) as tracer:
        with pytest.raises(vlscope.NotReachedError, match="step 20 is not reached: max_new_tokens is 10"):
            tracer.iter[20]
        tracer.stop()


@pytest.mark.parametrize("case", ["one_image", "padded_mixed"])
def test_gn_10_generation_without_a_cache_is_refused_and_full_traces_give_its_tokens(model, inputs, case):
    given = inputs("dense", case)
    with pytest.raises(TypeError, match=r"use_cache.*model\.trace"):
        model.generate(**given, use_cache=False)
    ids, rows = greedy_by_full_traces(model, given, 4)
    with model.generate(**given, max_new_tokens=4, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            torch.testing.assert_close(model.logits[:, -1], rows[step], rtol=1e-5, atol=1e-5)
    assert torch.equal(tracer.result, ids)


def test_gn_11_the_row_of_step_s_is_the_one_that_predicts_its_token(model, image):
    with model.generate(**image, max_new_tokens=4, eos_token_id=[]) as tracer:
        rows = [model.layers[2].layer_output[:, -1].clone() for _ in tracer.iter[:]]
    length = image["input_ids"].shape[1]
    full = {**image, "input_ids": tracer.result[:, :-1], "attention_mask": torch.ones(1, length + 3, dtype=torch.long)}
    with model.trace(**full):
        stream, logits = model.layers[2].layer_output.save(), model.logits.save()
    for step, row in enumerate(rows):
        torch.testing.assert_close(row, stream[:, length - 1 + step], rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[0, length - 1 :].argmax(-1), tracer.new_tokens[0])


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_gn_13_cached_steps_differ_from_full_traces_by_rounding_alone(checkpoint, image, dtype, bound):
    run = vlscope.load(checkpoint("dense"), dtype=dtype)
    length = image["input_ids"].shape[1]
    with run.generate(**image, max_new_tokens=20, eos_token_id=[]) as tracer:
        steps = [run.logits[0, -1].float().clone() for _ in tracer.iter[:]]
    full = {**image, "input_ids": tracer.result[:, :-1]}
    full["attention_mask"] = torch.ones_like(full["input_ids"])
    rows = run(**full).logits[0, length - 1 :].float()
    scale = rows.abs().max().clamp(min=1)
    for step, (cached, whole) in enumerate(zip(steps, rows, strict=True)):
        assert (cached - whole).abs().max() <= bound * scale
        if cached.argmax() != whole.argmax():  # only where the two likeliest lie closer than the bound
            top = whole.topk(2).values
            assert dtype == torch.bfloat16 and top[0] - top[1] <= 2 * bound * scale, step


def test_gn_late_edits_name_the_site_once_with_both_steps(model, text):
    with pytest.raises(vlscope.LateEditError, match=r"layers\.1\.layer_output of step 0 .* step 1"):  # noqa: SIM117
        with model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer:
            for step in tracer.iter[:]:
                if step == 0:
                    kept = model.layers[1].layer_output
                else:
                    kept[:] = 0
                    model.layers[1].layer_output


def test_gn_a_read_behind_the_last_step_says_which_step_has_ended(model, text):
    with model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            pass
        with pytest.raises(vlscope.OutOfOrderError, match="end of step 2 of its generation"):
            model.layers[0].layer_output


def test_gn_a_loop_over_all_steps_behind_another_suggests_where_to_go_on(model, text):
    with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:2]:
            model.layers[0].layer_output
        with pytest.raises(vlscope.OutOfOrderError, match=r"tracer\.iter\[2:\]"):
            for _ in tracer.iter[:]:
                pass
        assert list(tracer.iter[2:]) == [2, 3] and WIDE
