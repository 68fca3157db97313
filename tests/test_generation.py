"""Generation: the reference's tokens, values and edits on every step, and the ways it ends."""
# ruff: noqa: B018 - an attribute that is read and dropped is what many of these tests are about

import pytest
import torch

import tiny
import vlscope
from vlscope.verify import reference

NEW = 8


def generated(model, inputs, **options):
    return model.generate(**inputs, **{"max_new_tokens": NEW, "eos_token_id": [], **options}).result


def reference_tokens(model, inputs, **options):
    """Greedy tokens of transformers. Its generate takes positions from the mask, as ours do."""
    ids = inputs["input_ids"]
    types = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    types = types if types.any() else None
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": tiny.PAD, **options}
    return model.generate(**inputs, mm_token_type_ids=types, **settings)


# --- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "case", ["text", "one_image", "two_images", "padded_text", "padded_mixed", "videos", "images_and_videos"]
)
@pytest.mark.parametrize("name", [*tiny.CONFIGS, "demo"])
def test_greedy_tokens_are_the_references(vlscope_model, reference_model, inputs, name, case, attention):
    given = inputs(name, case)
    ours = generated(vlscope_model(name, attention), given)
    assert torch.equal(ours, reference_tokens(reference_model(name, attention), given))


def test_a_repetition_penalty_gives_the_references_tokens(model, reference_model, image):
    ours = generated(model, image, repetition_penalty=1.7, max_new_tokens=16)
    assert torch.equal(
        ours, reference_tokens(reference_model("dense", "sdpa"), image, repetition_penalty=1.7, max_new_tokens=16)
    )
    assert not torch.equal(ours, generated(model, image, max_new_tokens=16))


@pytest.mark.parametrize("case", ["padded_text", "padded_mixed"])
def test_each_row_of_a_padded_batch_is_generated_as_alone(model, inputs, case):
    batch = inputs("dense", case)
    together = generated(model, batch)[:, batch["input_ids"].shape[1] :]
    grids, pixels = batch.get("image_grid_thw"), batch.get("pixel_values")
    images = patches = 0
    for row, new in enumerate(together):
        kept = batch["attention_mask"][row].bool()
        alone = {"input_ids": batch["input_ids"][row, kept][None]}
        count = int((alone["input_ids"] == tiny.VISION_START).sum())
        if count:
            alone["image_grid_thw"] = grids[images : images + count]
            rows = int(alone["image_grid_thw"].prod(1).sum())
            alone["pixel_values"] = pixels[patches : patches + rows]
            images, patches = images + count, patches + rows
        assert new.tolist() == generated(model, alone)[0, kept.sum() :].tolist()


def test_the_ids_begin_with_the_prompt_and_hold_as_many_tokens_as_asked_for(model, image):
    ids = generated(model, image, max_new_tokens=3)
    length = image["input_ids"].shape[1]
    assert torch.equal(ids[:, :length], image["input_ids"]) and ids.shape[1] == length + 3


def test_an_end_token_ends_its_row_and_the_rest_of_it_is_padding(model, inputs):
    batch = inputs("dense", "padded_text")
    free = generated(model, batch)[:, batch["input_ids"].shape[1] :]
    first, second = int(free[0, 2]), int(free[1, 4])
    tracer = model.generate(**batch, max_new_tokens=NEW, eos_token_id=[first, second])
    new = tracer.new_tokens
    for row, found in enumerate(new.tolist()):
        ends = [at for at, token in enumerate(free[row].tolist()) if token in (first, second)]
        end = ends[0] + 1 if ends else NEW
        assert found[:end] == free[row, :end].tolist()[: len(found)]
        assert all(token == first for token in found[end:])  # this checkpoint names no pad token


def test_generation_stops_when_every_row_has_ended(model, text):
    free = generated(model, text)[0, text["input_ids"].shape[1] :].tolist()
    end = free[3]
    ids = generated(model, text, eos_token_id=end)
    assert ids[0, text["input_ids"].shape[1] :].tolist() == free[: free.index(end) + 1]


def test_the_end_tokens_are_those_of_the_generation_config(vlscope_model, reference_model):
    model = vlscope_model("demo")
    red = vlscope.demo.picture("red", size=(64, 64))
    tracer = model.generate("What color is the square? Answer with one word.", images=[red])
    assert tracer.text == "Red" and int(tracer.result[0, -1]) in (695, 697)


# --- sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9}],
    ids=str,
)
def test_tokens_are_drawn_from_the_references_distribution(options):
    from transformers.generation import logits_process as processors

    torch.manual_seed(0)
    scores, ids = torch.randn(3, 50) * 3, torch.randint(0, 50, (3, 7))
    expected = processors.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores.clone())
    for name, make in (
        ("temperature", processors.TemperatureLogitsWarper),
        ("top_k", processors.TopKLogitsWarper),
        ("top_p", processors.TopPLogitsWarper),
    ):
        if name in options:
            expected = make(options[name])(ids, expected)
    sampling = vlscope.Sampling(do_sample=True, repetition_penalty=1.3, **options)
    assert torch.equal(sampling.distribution(scores, ids), expected.softmax(-1))


def test_a_seed_repeats_the_draws_and_another_gives_others(model, text):
    draws = [
        generated(model, text, do_sample=True, temperature=3.0, top_k=500, seed=seed).tolist() for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"repetition_penalty": -1.0}],
    ids=str,
)
def test_a_setting_out_of_its_range_is_refused(model, text, options):
    (name,) = options
    with pytest.raises(vlscope.InputError, match=f"{name} is {options[name]}"):
        model.generate(**text, do_sample=True, **options)


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True])
def test_a_number_of_tokens_that_is_none_is_refused(model, text, count):
    with pytest.raises(vlscope.InputError, match="max_new_tokens is"):
        model.generate(**text, max_new_tokens=count)


def test_a_prompt_padded_on_the_right_is_refused(model, text):
    mask = torch.ones_like(text["input_ids"])
    mask[0, -2:] = 0
    with pytest.raises(vlscope.InputError, match="row 0: what is generated follows there"):
        generated(model, {**text, "attention_mask": mask})


# --- values on every step ---------------------------------------------------------------------------------------

STREAM = ["layers.0.layer_input", "layers.1.self_attn.attention_output", "layers.2.mlp.mlp_output", "norm.output"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["text", "one_image", "padded_mixed", "images_and_videos"])
def test_the_values_of_a_step_are_those_of_a_trace_of_all_tokens_so_far(vlscope_model, inputs, case, attention):
    model, given = vlscope_model("dense", attention), inputs("dense", case)
    interior = [
        "attention_queries",
        "attention_keys",
        "attention_values",
        "attention_scores",
        "attention_probabilities",
        "attention_head_outputs",
    ]
    sites = [*STREAM, *(f"layers.3.self_attn.{name}" for name in interior), "logits", "next_token_probs"]
    sites.sort(key=model.order)
    with model.generate(**given, max_new_tokens=3, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            for site in sites:
                model.get(site).save()
    ids, mask = tracer.result, given["attention_mask"]
    for step in range(3):
        length = mask.shape[1] + step
        so_far = {**given, "input_ids": ids[:, :length]}
        so_far["attention_mask"] = torch.cat([mask, torch.ones(len(mask), step, dtype=mask.dtype)], 1)
        with model.trace(**so_far) as whole:
            for site in sites:
                model.get(site).save()
        for site in sites:
            found, expected = tracer.saved[site][step], whole.saved[site]
            real = so_far["attention_mask"].bool()
            if site == "logits":
                expected = expected[:, -1:]
            elif site.endswith(("keys", "values")):
                expected, found = (x.transpose(1, 2)[real] for x in (expected, found))
            elif site.endswith(("scores", "probabilities", "queries")):
                expected, found = expected[:, :, -1:], found[:, :, -1:]
            elif site != "next_token_probs":
                expected, found = expected[:, -1:], found[:, -1:]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda m, s=site: f"{s}: {m}")


def test_image_values_are_there_on_the_prompt_step_alone(model, image):
    with model.generate(**image, max_new_tokens=2, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            mask = model.vision.image_token_mask
            if step == 0:
                assert mask.sum() == model.vision.image_features.shape[0]
                model.layers[0].deepstack_output
            else:
                assert mask.shape == (1, 1) and not mask.any()
                with pytest.raises(vlscope.NotReachedError, match="on its prompt step"):
                    model.vision.image_features


def test_reading_every_step_moves_no_token(model, image):
    with model.generate(**image, max_new_tokens=NEW, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            for layer in model.layers:
                layer.self_attn.attention_keys, layer.self_attn.attention_probabilities, layer.layer_output
            model.logits
    assert torch.equal(tracer.result, generated(model, image))


# --- edits ------------------------------------------------------------------------------------------------------


def test_an_edit_on_one_step_leaves_the_tokens_before_it_and_moves_those_behind(model, text):
    length, plain = text["input_ids"].shape[1], generated(model, text)
    with model.generate(**text, max_new_tokens=NEW, eos_token_id=[]) as tracer:
        for _ in tracer.iter[3]:
            model.layers[0].layer_output[:] = torch.linspace(-9, 9, model.hidden_size)
    assert torch.equal(tracer.result[:, : length + 3], plain[:, : length + 3])
    assert not torch.equal(tracer.result, plain)


def test_a_token_forced_through_the_logits_is_what_the_next_step_reads(model, text):
    with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            if step:
                assert model.input_ids.item() == 100 + step - 1
            model.logits[:, -1, 100 + step] = 1e6
    assert tracer.new_tokens.tolist() == [[100, 101, 102, 103]]


def test_edited_keys_last_for_the_steps_that_follow(model, text):
    """Values of a block zeroed once: at every later step the zeroed positions add nothing."""
    with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            values = model.layers[1].self_attn.attention_values
            if step == 1:
                values[:] = 0
            values.save()
    first, second, third, fourth = tracer.saved["layers.1.self_attn.attention_values"]
    length = text["input_ids"].shape[1]
    assert first.abs().sum() > 0 and second.abs().sum() == 0
    assert third[:, :, : length + 1].abs().sum() == 0 and third[:, :, length + 1 :].abs().sum() > 0
    assert torch.equal(fourth[:, :, : length + 2], third)


def test_keys_that_were_assigned_are_what_later_steps_attend_to(model, text):
    with model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            attention = model.layers[0].self_attn
            if step == 0:
                attention.attention_keys = torch.full_like(attention.attention_keys, 0.5)
            attention.attention_keys.save()
    *_, last = tracer.saved["layers.0.self_attn.attention_keys"]
    assert (last[:, :, : text["input_ids"].shape[1]] == 0.5).all()


def test_steering_every_step_is_steering_the_whole_text(model, text):
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            model.steer(1, vector)
    for step in range(4):
        length = text["input_ids"].shape[1] + step
        with model.trace(input_ids=tracer.result[:, :length]):
            model.steer(1, vector)
            token = model.logits[0, -1].argmax()
        assert token == tracer.result[0, length]


def test_a_block_skipped_on_every_step_is_not_computed_and_one_skipped_once_is_refused(model, text):
    with model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer:
        for _ in tracer.iter[:]:
            model.skip_layer(2)
    with model.trace(input_ids=tracer.result[:, :-1]):
        model.skip_layer(2)
        token = model.logits[0, -1].argmax()
    assert token == tracer.result[0, -1]
    with (
        pytest.raises(vlscope.InputError, match="it was skipped on an earlier step"),
        model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer,
    ):
        model.skip_layer(2)
    assert torch.equal(generated(model, text), generated(model, text))


def test_an_edit_of_an_earlier_steps_tensor_is_late(model, text):
    with (
        pytest.raises(vlscope.LateEditError, match=r"layers\.1\.layer_output of step 0 was edited after"),
        model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer,
    ):
        for step in tracer.iter[:]:
            if step == 0:
                kept = model.layers[1].layer_output
            else:
                kept[:] = 0
                model.logits


def test_gradients_reach_back_over_the_steps(model, text):
    with model.generate(**text, max_new_tokens=3, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            if step == 0:
                start = model.layers[0].layer_output
                start.requires_grad_()
            end = model.logits
    (gradient,) = torch.autograd.grad(end.sum(), start)
    assert gradient.abs().sum() > 0
    assert torch.equal(tracer.result, generated(model, text, max_new_tokens=3))


# --- going through the steps ------------------------------------------------------------------------------------


def steps(model, text, choose, **options):
    with model.generate(**text, max_new_tokens=6, eos_token_id=[], **options) as tracer:
        found = list(choose(tracer))
    assert tracer.result.shape[1] == text["input_ids"].shape[1] + 6
    return found


def test_steps_are_taken_by_slice_index_and_list(model, text):
    assert steps(model, text, lambda t: t.iter[:]) == [0, 1, 2, 3, 4, 5]
    assert steps(model, text, lambda t: t.iter) == [0, 1, 2, 3, 4, 5]
    assert steps(model, text, lambda t: t.all()) == [0, 1, 2, 3, 4, 5]
    assert steps(model, text, lambda t: t.iter[1:4]) == [1, 2, 3]
    assert steps(model, text, lambda t: t.iter[2:]) == [2, 3, 4, 5]
    assert steps(model, text, lambda t: t.iter[::2]) == [0, 2, 4]
    assert steps(model, text, lambda t: t.iter[4]) == [4]
    assert steps(model, text, lambda t: t.iter[[0, 3]]) == [0, 3]
    assert steps(model, text, lambda t: [*t.iter[0:2], *t.iter[2:4]]) == [0, 1, 2, 3]
    assert steps(model, text, lambda t: t.iter[3:3]) == []


def test_steps_that_cannot_be_are_refused_before_anything_runs(model, text):
    for choose, error, message in (
        (lambda t: t.iter[-1], ValueError, "count from 0"),
        (lambda t: t.iter[:-1], ValueError, "count from 0"),
        (lambda t: t.iter[6], vlscope.NotReachedError, "max_new_tokens is 6"),
        (lambda t: t.iter[0:7], vlscope.NotReachedError, "max_new_tokens is 6"),
        (lambda t: t.iter[::-1], ValueError, "forward only"),
        (lambda t: t.iter["2"], TypeError, "integers, slices and lists"),
    ):
        with model.generate(**text, max_new_tokens=6, eos_token_id=[]) as tracer:
            with pytest.raises(error, match=message):
                choose(tracer)
            assert tracer.step == 0
            tracer.stop()


def test_a_step_that_has_passed_is_refused(model, text):
    with model.generate(**text, max_new_tokens=4, eos_token_id=[]) as tracer:
        for _ in tracer.iter[2]:
            with pytest.raises(vlscope.OutOfOrderError, match="already stands at step 2"):
                next(tracer.iter[1])


def test_a_bounded_loop_that_the_generation_does_not_fill_raises_and_an_open_one_ends(model, text):
    free = generated(model, text)[0, text["input_ids"].shape[1] :].tolist()
    end = free[2]
    count = free.index(end) + 1
    with model.generate(**text, max_new_tokens=NEW, eos_token_id=end) as tracer:
        assert list(tracer.iter[:]) == list(range(count))
    with (
        pytest.raises(vlscope.NotReachedError, match=f"ended after {count} steps"),
        model.generate(**text, max_new_tokens=NEW, eos_token_id=end) as tracer,
    ):
        for _ in tracer.iter[0:5]:
            pass


def test_a_backwards_read_inside_a_step_raises(model, text):
    with model.generate(**text, max_new_tokens=2) as tracer:
        for _ in tracer.iter[1]:
            model.layers[2].layer_output
            with pytest.raises(vlscope.OutOfOrderError):
                model.layers[1].layer_output


def test_stop_ends_the_generation_and_what_was_saved_stays(model, text):
    with model.generate(**text, max_new_tokens=NEW, eos_token_id=[]) as tracer:
        for step in tracer.iter[:]:
            model.layers[0].layer_output.save()
            if step == 2:
                tracer.stop()
    assert [kept.shape[1] for kept in tracer.saved["layers.0.layer_output"]] == [text["input_ids"].shape[1], 1, 1]
    assert tracer.new_tokens.tolist() == generated(model, text)[:, -NEW:][:, :2].tolist()


def test_an_exception_ends_the_generation_and_the_model_works_on(model, text):
    with pytest.raises(ZeroDivisionError), model.generate(**text, max_new_tokens=NEW) as tracer:
        for _ in tracer.iter[1]:
            kept = model.layers[0].layer_output.save()
            1 / 0  # noqa: B018
    assert tracer.saved["layers.0.layer_output"][0] is kept
    with pytest.raises(vlscope.OutOfOrderError, match="had ended"):
        next(tracer.iter[:])
    assert torch.equal(generated(model, text), generated(model, text))


def test_the_result_can_be_had_inside_the_block(model, text):
    with model.generate(**text, max_new_tokens=NEW, eos_token_id=[]) as tracer:
        model.layers[0].layer_output[:, -1] *= 2
        inside = tracer.result
    assert torch.equal(inside, tracer.result) and inside.shape[1] == text["input_ids"].shape[1] + NEW


def test_values_of_two_generations_in_lockstep_do_not_meet(model, text, image):
    alone = [generated(model, text, max_new_tokens=3), generated(model, image, max_new_tokens=3)]
    with (
        model.generate(**text, max_new_tokens=3, eos_token_id=[]) as one,
        model.generate(**image, max_new_tokens=3, eos_token_id=[]) as two,
    ):
        for step in range(3):
            next(one.iter[step])
            next(two.iter[step])
            one.layers[1].layer_output, two.layers[1].layer_output
    assert torch.equal(one.result, alone[0]) and torch.equal(two.result, alone[1])


def test_a_batch_gives_a_text_for_each_prompt(vlscope_model):
    model = vlscope_model("demo")
    texts = model.generate(["Hello", "What is a big"], max_new_tokens=5, eos_token_id=[]).text
    assert texts == [
        model.generate(prompt, max_new_tokens=5, eos_token_id=[]).text for prompt in ("Hello", "What is a big")
    ]


def test_the_reference_agrees_with_itself_on_what_is_compared_here(reference_model, text):
    """A greedy token is the largest logit of a plain forward."""
    model = reference_model("dense", "sdpa")
    tokens = reference_tokens(model, text)
    logits = reference.run(
        model, {"input_ids": tokens[:, :-1], "attention_mask": torch.ones_like(tokens[:, :-1])}
    ).logits
    assert logits[0, -1].argmax() == tokens[0, -1]
