"""Prompts whose answers are counted: which tokens stand for a word, and what their probabilities sum to."""

import pytest
import torch

import vlscope
from vlscope.demo import picture
from vlscope.interventions import logit_lens
from vlscope.prompts import Prompt, TokenizationError, encode_batch, get_first_tokens, run_prompts

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


def with_image(color, size=(96, 64)):
    return {"prompt": "What color is the square?", "images": [picture(color, size=size)]}


def first(model, text):
    return model.tokenizer.encode(text)[0]


# --- the tokens of words ----------------------------------------------------------------------------------------


def test_a_word_counts_as_it_stands_and_behind_a_space(model):
    assert get_first_tokens("Paris", model) == [first(model, "Paris"), first(model, " Paris")]
    assert get_first_tokens(["Paris", "Rome", "Paris"], model) == [
        first(model, text) for text in ("Paris", " Paris", "Rome", " Rome")
    ]


def test_a_word_that_brings_its_space_is_taken_as_it_is(model):
    assert get_first_tokens(" Paris", model) == [first(model, " Paris")]


def test_a_model_its_tokenizer_and_that_of_transformers_give_the_same_tokens(model, checkpoint, auto):
    for word in ("Paris", "Red", "Two"):
        found = get_first_tokens(word, model)
        assert get_first_tokens(word, model.tokenizer) == found
        assert get_first_tokens(word, auto(checkpoint("demo")).tokenizer) == found


def test_a_word_of_several_tokens_is_counted_by_its_first_with_a_warning(model):
    with pytest.warns(UserWarning, match="'Parisian' by 'Paris'"):
        assert get_first_tokens("Parisian", model)[0] == first(model, "Paris")


class SpaceBefore:
    """A tokenizer that puts a space before every text."""

    def encode(self, text, add_special_tokens):
        return [len(text.strip())]

    def decode(self, ids):
        return "x"


class SpaceAlone:
    """A tokenizer in which a space is a token of its own."""

    def encode(self, text, add_special_tokens):
        return [0, 1] if text.startswith(" ") else [1]

    def decode(self, ids):
        return " " if ids[0] == 0 else "x"


def test_a_token_that_is_only_the_space_is_left_out():
    assert get_first_tokens("word", SpaceAlone()) == [1]


def test_words_without_tokens_of_their_own_are_refused(model):
    for words, tokenizer, said in (
        ("", model, "no words"),
        ([], model, "no words"),
        (["Paris", ""], model, "'' has no tokens"),
        (" ", model, "' ' has no tokens"),
        ("word", SpaceBefore(), "'word' and ' word' begin with one token, 4.*add_prefix_space=False"),
    ):
        with pytest.raises(TokenizationError, match=said):
            get_first_tokens(words, tokenizer)
    assert issubclass(TokenizationError, ValueError) and TokenizationError is vlscope.TokenizationError


# --- prompts with targets ---------------------------------------------------------------------------------------


def test_words_with_and_without_names_become_targets(model):
    named = Prompt.from_strings(FRANCE, {"right": "Paris", "wrong": ["Rome", "Madrid"]}, model)
    assert named.target_tokens == {
        "right": get_first_tokens("Paris", model),
        "wrong": get_first_tokens(["Rome", "Madrid"], model),
    }
    assert named.target_strings == {"right": "Paris", "wrong": ["Rome", "Madrid"]}
    for words in ("Paris", ["Paris", "Rome"]):
        unnamed = Prompt.from_strings(FRANCE, words, model.tokenizer)
        assert unnamed.target_tokens == {"target": get_first_tokens(words, model)}
        assert unnamed.has_no_collisions()


def test_targets_that_share_a_token_collide_with_a_warning(model):
    with pytest.warns(UserWarning, match="'Paris' of a and b"):
        shared = Prompt.from_strings(FRANCE, {"a": ["Paris", "Rome"], "b": "Paris", "c": "Madrid"}, model)
    assert not shared.has_no_collisions()
    assert shared.has_no_collisions(ignore_targets="b") and shared.has_no_collisions(["a", "c"])
    assert not shared.has_no_collisions("c")
    assert Prompt(FRANCE, {"a": [3, 3], "b": [4]}).has_no_collisions()  # a token named twice is no collision


def test_the_probability_of_a_target_is_the_sum_of_its_tokens_each_counted_once():
    probs = torch.arange(24.0).reshape(2, 3, 4)
    prompt = Prompt("", {"a": [0, 3], "b": [1, 1]})
    found = prompt.get_target_probs(probs)
    assert torch.equal(found["a"], probs[..., 0] + probs[..., 3]) and torch.equal(found["b"], probs[..., 1])
    assert torch.equal(prompt.get_target_probs(probs, layer=-1)["a"], found["a"][:, -1])
    with pytest.raises(vlscope.InputError, match=r"\[prompts, layers, vocab_size\].*\[3, 4\]"):
        prompt.get_target_probs(probs[0])


def test_a_prompt_is_run_through_a_lens(model):
    prompt = Prompt.from_strings(FRANCE, {"right": "Paris", "wrong": "Rome"}, model)
    found = prompt.run(model, logit_lens)
    seen = logit_lens(model, FRANCE)
    assert found["right"].shape == (1, 6)
    assert torch.equal(found["right"], seen[..., get_first_tokens("Paris", model)].sum(-1))
    assert found["right"][0, -1] > 0.9 > 0.1 > found["wrong"][0, -1]


# --- many prompts -----------------------------------------------------------------------------------------------


def mixed(model):
    """Prompts of other lengths, with and without an image, whose targets have the same names."""
    return [
        Prompt.from_strings(FRANCE, {"right": "Paris", "wrong": "Rome"}, model),
        Prompt.from_strings(with_image("red"), {"wrong": ["Blue", "Green"], "right": "Red"}, model),
        Prompt.from_strings("Well. " + ITALY, {"right": "Rome", "wrong": "Paris"}, model),
        Prompt.from_strings(with_image("blue", (64, 96)), {"right": "Blue", "wrong": "Red"}, model),
    ]


def test_by_default_the_probabilities_are_those_of_the_next_token(model):
    prompts = mixed(model)
    found = run_prompts(model, prompts)
    assert {name: tuple(probs.shape) for name, probs in found.items()} == {"right": (4, 1), "wrong": (4, 1)}
    for row, prompt in enumerate(prompts):
        with model.trace(**encode_batch(model, prompt.prompt)):
            plain = model.next_token_probs[0]
        for name, tokens in prompt.target_tokens.items():
            torch.testing.assert_close(found[name][row, 0], plain[tokens].sum(), rtol=1e-4, atol=1e-6)


def test_the_size_of_a_batch_changes_nothing(model):
    prompts = mixed(model)
    whole = run_prompts(model, prompts, get_probs_func=logit_lens)
    assert whole["right"].shape == (4, 6)
    for size in (1, 3):
        parts = run_prompts(model, prompts, size, logit_lens)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-6)


def test_a_function_of_ones_own_is_given_lists_of_prompts_and_its_arguments(model):
    calls = []

    def uniform(given, prompts, *, layers):
        calls.append((given, list(prompts), layers))
        return torch.full((len(prompts), layers, model.vocab_size), 0.5)

    prompts = [Prompt(text, {"a": [1, 2], "b": [3]}) for text in ("x", "y", "z")]
    found = run_prompts(model, prompts, batch_size=2, get_probs_func=uniform, func_kwargs={"layers": 2})
    assert calls == [(model, ["x", "y"], 2), (model, ["z"], 2)]
    assert torch.equal(found["a"], torch.full((3, 2), 1.0)) and torch.equal(found["b"], torch.full((3, 2), 0.5))
    with pytest.raises(vlscope.InputError, match=r"\[3, layers, vocab_size\]; these are \[2, 1, 704\]"):
        run_prompts(model, prompts, get_probs_func=lambda model, batch: torch.zeros(2, 1, 704))


def test_prompts_whose_targets_have_other_names_are_refused_before_anything_runs(model):
    prompts = [Prompt(FRANCE, {"right": [1]}), Prompt(ITALY, {"wrong": [1]})]

    def never(model, batch):
        raise AssertionError("something ran")

    with pytest.raises(vlscope.InputError, match="the first has right, and prompt 1 has wrong"):
        run_prompts(model, prompts, batch_size=1, get_probs_func=never)
    with pytest.raises(vlscope.InputError, match="batch_size is 0"):
        run_prompts(model, prompts[:1], batch_size=0)
    assert run_prompts(model, []) == {}


def test_no_bar_is_shown_where_stderr_is_no_terminal_and_no_gradient_recorded(model, capsys):
    found = run_prompts(model, [Prompt(FRANCE, {"a": [1]})])
    assert capsys.readouterr() == ("", "") and not found["a"].requires_grad


# --- batches of dicts -------------------------------------------------------------------------------------------


def test_a_batch_of_dicts_is_the_batch_with_its_images_beside_it(model):
    red, blue = with_image("red"), with_image("blue")
    found = encode_batch(model, [FRANCE, red, {"prompt": "Hello"}, blue])
    images = [[], red["images"], [], blue["images"]]
    expected = model.encode([FRANCE, red["prompt"], "Hello", blue["prompt"]], images=images)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_dict_in_a_batch_holds_a_prompt_its_images_and_videos_alone(model):
    red = with_image("red")
    with pytest.raises(vlscope.InputError, match="prompt 1 of the list has 'logits_to_keep'"):
        encode_batch(model, [FRANCE, {**red, "logits_to_keep": 1}])
    with pytest.raises(vlscope.InputError, match="images are given for prompt 1 and beside the list"):
        encode_batch(model, [FRANCE, red], images=[[], red["images"]])
