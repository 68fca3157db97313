"""The lenses of vlscope.interventions, each against the identity that defines it."""

import pytest
import torch

import vlscope
from vlscope.demo import picture
from vlscope.interventions import (
    TargetPrompt,
    it_repeat_prompt,
    logit_lens,
    patch_object_attn_lens,
    patchscope_generate,
    patchscope_lens,
    repeat_prompt,
)

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"
BATCH = ["Two and three is", FRANCE, {"prompt": "What color is the square?", "images": [picture("red", size=(96, 64))]}]
FAMILIES = ["demo", "moe", "qwen2_5", "qwen2", "hybrid"]


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")  # six text blocks


def with_image(color):
    return {"prompt": "What color is the square?", "images": [picture(color, size=(96, 64))]}


def probabilities(model, prompt):
    """[prompts, vocab_size], the model's own."""
    given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    with torch.no_grad(), model.trace(**given):
        return model.next_token_probs.save()


def outputs(model, prompt):
    """The output of each block."""
    given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    with torch.no_grad(), model.trace(**given):
        return [layer.layer_output.save() for layer in model.layers]


# --- the logit lens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lens_at_the_last_block_is_the_models_own_answer(name, vlscope_model, inputs):
    model = vlscope_model(name)
    for case in ("text", "one_image", "padded_mixed", "images_and_videos"):
        given = inputs(name, case)
        seen = logit_lens(model, given)
        assert seen.shape == (len(given["input_ids"]), model.num_layers, model.vocab_size)
        torch.testing.assert_close(seen[:, -1], probabilities(model, given), rtol=1e-5, atol=1e-7)
        assert not torch.allclose(seen[:, 0], seen[:, -1], atol=1e-3)


def test_of_one_prompt_the_lens_at_the_last_block_is_the_models_own_answer_to_the_bit(model):
    for prompt in (FRANCE, with_image("red")):
        assert torch.equal(logit_lens(model, prompt)[:, -1], probabilities(model, prompt))


def test_each_block_is_read_through_the_final_norm_and_the_head(model):
    seen = logit_lens(model, FRANCE)
    for layer, stream in enumerate(outputs(model, FRANCE)):
        by_hand = model.lm_head(model.norm(stream))[:, -1].softmax(-1)
        torch.testing.assert_close(seen[:, layer], by_hand)


def test_the_lens_at_positions_reads_the_logits_of_these_positions(model):
    with torch.no_grad(), model.trace(FRANCE):
        whole = model.logits.softmax(-1).save()
    seen = logit_lens(model, FRANCE, positions=[0, -2, 4], layers=-1)
    assert seen.shape == (1, 1, 3, model.vocab_size)
    torch.testing.assert_close(seen[:, 0], whole[:, [0, 3, 4]])
    assert torch.equal(logit_lens(model, FRANCE, positions=3), logit_lens(model, FRANCE, positions=[3])[:, :, 0])


def test_each_prompt_of_a_batch_is_read_as_if_alone_at_its_own_positions(model):
    together = logit_lens(model, BATCH, positions=[0, 2, -1])
    for row, prompt in zip(together, BATCH, strict=True):
        torch.testing.assert_close(row, logit_lens(model, prompt, positions=[0, 2, -1])[0], rtol=1e-4, atol=1e-6)


def test_blocks_come_in_the_order_asked_for(model):
    every = logit_lens(model, FRANCE)
    assert torch.equal(logit_lens(model, FRANCE, layers=[4, -6, 4]), every[:, [4, 0, 4]])
    assert torch.equal(logit_lens(model, FRANCE, layers=2), every[:, [2]])


def test_the_inverse_is_the_softmax_of_the_negated_logits(model):
    seen, inverse = logit_lens(model, FRANCE, return_inv_logits=True)
    logits = torch.stack([model.project_on_vocab(stream[:, -1]) for stream in outputs(model, FRANCE)], 1)
    torch.testing.assert_close(inverse, (-logits).softmax(-1))
    assert torch.equal(seen, logit_lens(model, FRANCE))
    assert inverse[0, -1, seen[0, -1].argmax()] < 1e-6


def test_what_has_been_encoded_recorded_or_given_beside_its_images_is_the_same_prompt(model):
    red = with_image("red")
    seen = logit_lens(model, red)
    assert torch.equal(logit_lens(model, red["prompt"], images=red["images"]), seen)
    assert torch.equal(logit_lens(model, model.encode(**red)), seen)
    assert torch.equal(logit_lens(model, model.record(**red)), seen)


def test_a_standing_edit_is_seen(model):
    with model.edit("layers.2.layer_output", torch.zero_):
        edited = logit_lens(model, FRANCE)
    plain = logit_lens(model, FRANCE)
    assert torch.equal(edited[:, :2], plain[:, :2]) and not torch.allclose(edited[:, 2:], plain[:, 2:])


# --- target prompts ---------------------------------------------------------------------------------------------


def test_the_repeat_prompt_repeats_words_and_ends_with_the_placeholder():
    assert repeat_prompt() == TargetPrompt("king king\n1135 1135\nhello hello\n?", -1)
    made = repeat_prompt(["cat", "sun"], rel="->", sep=";", placeholder="x", index_to_patch=2)
    assert made == TargetPrompt("cat->cat;sun->sun;x", 2)


@pytest.mark.parametrize("instructed", [True, False])
@pytest.mark.parametrize("system", [True, False])
def test_the_chat_form_ends_with_the_words_or_with_an_open_turn(model, instructed, system):
    options = {"add_user_instr": instructed, "use_system_prompt": system}
    whole = it_repeat_prompt(model, ["cat"], **options)
    opened = it_repeat_prompt(model, ["cat"], complete_prompt=False, **options)
    assert whole == TargetPrompt(f"{opened.prompt}cat cat\n?", -1)
    assert opened.prompt.endswith("cat cat\n?<|im_end|>\n<|im_start|>assistant\n")
    assert opened.prompt.count("<|im_start|>user") == 1 + instructed
    assert ("<|im_start|>system" in opened.prompt) == system and "which word comes next" in opened.prompt


class Thinker:
    """A template that opens a turn with thoughts, and ends those of a finished answer before it."""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        turns = [f"<{turn['role']}>{turn['content'].strip()}</{turn['role']}>" for turn in messages]
        if turns[-1].startswith("<assistant>"):
            turns[-1] = turns[-1].replace("<assistant>", "<assistant><think></think>")
        return "".join(turns) + ("<assistant><think>" if add_generation_prompt else "")


def test_the_words_are_those_of_an_answer_and_not_of_its_thoughts():
    made = it_repeat_prompt(Thinker(), ["cat"], use_system_prompt=False)
    assert made.prompt.endswith("<user>cat cat\n?</user><assistant><think></think>cat cat\n?")
    assert it_repeat_prompt(Thinker(), ["cat"], placeholder="x ").prompt.endswith("</think>cat cat\nx")
    opened = it_repeat_prompt(Thinker(), ["cat"], complete_prompt=False)
    assert opened.prompt.endswith("<user>cat cat\n?</user><assistant><think>")


def test_the_chat_form_takes_a_model_a_processor_or_a_tokenizer_of_transformers(model, checkpoint, auto):
    made = it_repeat_prompt(model)
    assert it_repeat_prompt(model.processor) == made
    assert it_repeat_prompt(auto(checkpoint("demo"))) == made
    assert it_repeat_prompt(auto(checkpoint("demo")).tokenizer) == made
    assert it_repeat_prompt(vlscope.load("demo", task="text-generation", dispatch=False)) == made
    with pytest.raises(vlscope.InputError, match="chat template: give the model"):
        it_repeat_prompt(model.tokenizer)


# --- patchscopes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "hybrid"])
def test_a_state_put_into_its_own_place_changes_nothing(name, vlscope_model, inputs):
    model = vlscope_model(name)
    for case in ("text", "one_image"):
        given = inputs(name, case)
        for place in (1, -1):
            seen = patchscope_lens(model, given, TargetPrompt(given, place), position=place)
            plain = probabilities(model, given)
            assert torch.equal(seen, plain[:, None].expand_as(seen)), (case, place)


def test_a_state_of_the_last_block_at_the_last_position_is_the_sources_own_answer(model):
    sources = [FRANCE, ITALY, with_image("red")]
    seen = patchscope_lens(model, sources, layers=-1)
    for row, source in zip(seen, sources, strict=True):
        torch.testing.assert_close(row, probabilities(model, source), rtol=1e-4, atol=1e-6)


def test_each_row_is_the_assignment_written_by_hand(model):
    seen = patchscope_lens(model, FRANCE, TargetPrompt(ITALY, 3), layers=[4, 1], position=3)
    for column, layer in enumerate((4, 1)):
        state = outputs(model, FRANCE)[layer][:, 3]
        with torch.no_grad(), model.trace(ITALY):
            model.layers[layer].layer_output[:, 3] = state
            assert torch.equal(seen[:, column], model.next_token_probs)


def test_several_sources_go_into_one_target_each_or_into_the_same(model):
    targets = [TargetPrompt(ITALY, 3), TargetPrompt("Two and three is", -2)]
    seen = patchscope_lens(model, [FRANCE, "The day after Monday is"], targets)
    for row, source, target in zip(seen, [FRANCE, "The day after Monday is"], targets, strict=True):
        torch.testing.assert_close(row, patchscope_lens(model, source, target)[0], rtol=1e-4, atol=1e-6)
    same = patchscope_lens(model, [FRANCE, ITALY], targets[0])
    torch.testing.assert_close(same, patchscope_lens(model, [FRANCE, ITALY], [targets[0]] * 2))


def test_an_image_token_is_read_out_in_another_prompt_with_an_image(model):
    """The state of an image token of the red square, in the place of one of the blue square's."""
    red, blue = with_image("red"), with_image("blue")
    (image,) = model.image_tokens(**red)
    place = int(image.positions[2])
    seen = patchscope_lens(model, red, TargetPrompt(blue, place), layers=3, position=place)
    state = outputs(model, red)[3][:, place]
    with torch.no_grad(), model.trace(**blue):
        model.layers[3].layer_output[:, place] = state
        assert torch.equal(seen[:, 0], model.next_token_probs)
    assert not torch.equal(seen[:, 0], probabilities(model, blue))


def test_latents_take_the_place_of_source_prompts(model):
    states = torch.stack([stream[:, -1] for stream in outputs(model, FRANCE)])
    target = TargetPrompt(ITALY, -1)
    assert torch.equal(patchscope_lens(model, None, target, latents=states), patchscope_lens(model, FRANCE, target))
    moved = patchscope_lens(model, None, target, layers=[2, 5], latents=states[[5, 5]])  # to other blocks
    assert torch.equal(moved[:, 1], probabilities(model, FRANCE)) and not torch.equal(moved[:, 0], moved[:, 1])


# --- generation from a patched prompt ---------------------------------------------------------------------------


def test_a_generation_with_a_state_in_its_own_place_is_the_plain_one(model):
    for prompt in (FRANCE, with_image("red")):
        given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        plain = model.generate(**given, max_new_tokens=4).result
        made = patchscope_generate(model, prompt, TargetPrompt(prompt, 2), max_length=4, position=2)
        assert list(made) == list(range(6)) and all(torch.equal(ids, plain) for ids in made.values())


def test_a_generation_is_the_edit_of_the_prompt_step_written_by_hand(model):
    target = TargetPrompt("The day after Monday is", 4)
    made = patchscope_generate(model, "The day after Friday is", target, max_length=3, layers=[0, 3])
    assert list(made) == [0, 3]
    for layer, ids in made.items():
        state = outputs(model, "The day after Friday is")[layer][:, -1]
        with torch.no_grad(), model.generate(target.prompt, max_new_tokens=3) as tracer:
            model.layers[layer].layer_output[:, 4] = state
        assert torch.equal(ids, tracer.result)
    plain = model.generate(target.prompt, max_new_tokens=3).result
    assert not torch.equal(made[0], plain)


def test_each_source_is_generated_for_as_if_alone_whatever_the_size_of_a_batch(model):
    sources = [FRANCE, "The day after Monday is", "Two and three is"]
    together = patchscope_generate(model, sources, max_length=4, layers=[1, -1])
    for size in (1, 2):
        parts = patchscope_generate(model, sources, max_length=4, layers=[1, -1], max_batch_size=size)
        assert all(torch.equal(parts[layer], together[layer]) for layer in (1, 5))
    length = len(model.tokenizer.encode(repeat_prompt().prompt))
    for row, source in enumerate(sources):
        answer = probabilities(model, source).argmax(-1)
        assert together[5][row, length] == answer  # the last block's state is the source's own answer


def test_rows_of_a_generation_that_ended_early_are_filled_with_the_pad_token(model):
    sources = [FRANCE, with_image("red")]
    made = patchscope_generate(model, sources, TargetPrompt(ITALY, -1), max_length=6, layers=5, max_batch_size=1)[5]
    alone = [
        patchscope_generate(model, source, TargetPrompt(ITALY, -1), max_length=6, layers=5)[5][0] for source in sources
    ]
    lengths = [len(row) for row in alone]
    assert made.shape == (2, max(lengths))
    for row, own in zip(made, alone, strict=True):
        assert torch.equal(row[: len(own)], own) and row[len(own) :].eq(model.tokenizer.pad_token_id).all()


# --- another state for the attention to read --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "hybrid"])
def test_the_attention_given_what_it_reads_anyway_changes_nothing(name, vlscope_model, inputs):
    model = vlscope_model(name)
    given = inputs(name, "one_image")
    seen = patch_object_attn_lens(model, given, given, -1, num_patches=2)
    plain = probabilities(model, given)
    assert seen.shape == (1, model.num_layers, model.vocab_size)
    assert torch.equal(seen, plain[:, None].expand_as(seen))


def test_a_window_of_blocks_reads_the_sources_last_token(model):
    sources, targets = [FRANCE, "The capital of Spain is"], [ITALY, "Two and three is"]
    seen = patch_object_attn_lens(model, sources, targets, 2, num_patches=3)
    with torch.no_grad(), model.trace(sources):
        entering = [layer.self_attn.input[:, -1] for layer in model.layers]
    for first in range(6):
        with torch.no_grad(), model.trace(targets):
            lengths = model.attention_mask.sum(1)
            places = model.input_size[1] - lengths + 2
            for layer in range(first, min(6, first + 3)):
                model.layers[layer].self_attn.input[torch.arange(2), places] = entering[layer]
            by_hand = model.next_token_probs
        assert torch.equal(seen[:, first], by_hand)
    assert not torch.allclose(seen[:, 0], probabilities(model, targets), atol=1e-3)


def test_one_source_serves_every_target(model):
    targets = [ITALY, with_image("red")]
    once = patch_object_attn_lens(model, FRANCE, targets, 3)
    torch.testing.assert_close(once, patch_object_attn_lens(model, [FRANCE, FRANCE], targets, 3))


# --- what all of them refuse and keep ---------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_naming_both_numbers(model):
    latents = torch.zeros(6, 1, 64)
    refused = [
        (lambda: logit_lens(model, FRANCE, layers=6), IndexError, "layer 6: the model has 6"),
        (lambda: logit_lens(model, FRANCE, layers=[]), vlscope.InputError, "layers is empty.* 6 blocks"),
        (lambda: logit_lens(model, FRANCE, layers=0.5), TypeError, "layer 0.5"),
        (lambda: logit_lens(model, ["Two", FRANCE], positions=2), vlscope.InputError, "position 2 of prompt 0: .* 1 "),
        (lambda: logit_lens(model, FRANCE, positions=[]), vlscope.InputError, "integer"),
        (lambda: logit_lens(model, FRANCE, positions=1.5), vlscope.InputError, "position 1.5"),
        (lambda: logit_lens(model, []), vlscope.InputError, "empty"),
        (lambda: logit_lens(model, FRANCE, remote=True), TypeError, "remote.* in this process"),
        (lambda: patchscope_lens(model), vlscope.InputError, "one of the two"),
        (lambda: patchscope_lens(model, FRANCE, latents=latents), vlscope.InputError, "one of the two"),
        (lambda: patchscope_lens(model, latents=latents[:4]), vlscope.InputError, r"\[6, sources, 64\].*\[4, 1, 64\]"),
        (lambda: patchscope_lens(model, latents=latents, images=[]), TypeError, "images belongs to source prompts"),
        (lambda: patchscope_lens(model, FRANCE, FRANCE), vlscope.InputError, "TargetPrompt.* str"),
        (lambda: patchscope_lens(model, FRANCE, [repeat_prompt()] * 2), vlscope.InputError, "1 sources and 2 target"),
        (lambda: patchscope_lens(model, FRANCE, TargetPrompt("Two", 1)), vlscope.InputError, "position 1 .* 1 "),
        (lambda: patchscope_generate(model, FRANCE, max_batch_size=0), vlscope.InputError, "max_batch_size is 0"),
        (lambda: patchscope_generate(model, FRANCE, max_length=0), vlscope.InputError, "max_new_tokens is 0"),
        (lambda: patch_object_attn_lens(model, FRANCE, ITALY, 5), vlscope.InputError, "position 5 of prompt 0.* 5 "),
        (lambda: patch_object_attn_lens(model, FRANCE, ITALY, 0, 0), vlscope.InputError, "num_patches is 0"),
        (lambda: patch_object_attn_lens(model, [FRANCE] * 3, [ITALY] * 2, 0), vlscope.InputError, "3 source.* 2 tar"),
    ]
    for run, error, words in refused:
        with pytest.raises(error, match=words):
            run()


def test_no_lens_records_a_gradient_or_shows_a_bar_where_stderr_is_no_terminal(model, capsys):
    with torch.enable_grad():
        found = [
            logit_lens(model, FRANCE),
            patchscope_lens(model, FRANCE, layers=1),
            patch_object_attn_lens(model, FRANCE, ITALY, 1),
        ]
    assert not any(seen.requires_grad for seen in found)
    assert capsys.readouterr() == ("", "")
