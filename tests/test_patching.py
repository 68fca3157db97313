"""Each method of vlscope.patching against the identity that defines it."""
# ruff: noqa: B018 - reading an attribute is the test

import itertools

import pytest
import torch

import vlscope
from vlscope import patching, sites
from vlscope.demo import picture

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"
PAIR = (" Paris", " Rome")


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo", "eager")  # six text blocks, DeepStack after the first three


@pytest.fixture(scope="module")
def double(checkpoint):
    return vlscope.load(checkpoint("dense"), dtype=torch.float64, attn_implementation="eager")


def probe(logits):
    """A smooth metric of all logits of the last position."""
    weights = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    return (logits[0, -1] * weights).sum()


def with_image(color):
    return {"prompt": "What color is the square?", "images": [picture(color, size=(96, 64))]}


def logits_with(model, prompt, edit):
    given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    with torch.no_grad(), model.trace(**given) as tracer:
        edit(tracer)
        return tracer.logits.save()


# --- sweeps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["layer_output", "layer_input"])
def test_patching_every_position_of_a_block_equals_running_clean_from_there(model, site):
    got = patching.sweep(model, FRANCE, ITALY, site, positions=[slice(None)], metric=PAIR)
    assert got.values.shape == (6, 1)
    assert got.values.eq(got.clean).all() and got.clean != got.corrupted
    assert got.recovered.eq(1).all()


def test_patching_the_stream_of_an_image_prompt_equals_running_clean_once_deepstack_is_in(model):
    red, blue = with_image("red"), with_image("blue")
    got = patching.sweep(model, red, blue, "layer_input", positions=[slice(None)], metric=("Red", "Blue"))
    assert got.values[3:].eq(got.clean).all()
    assert got.values[:3].ne(got.clean).all()  # blocks 0 to 2 are followed by the blue run's DeepStack features


def test_patching_what_the_tower_gives_equals_the_clean_run(model):
    red, blue = with_image("red"), with_image("blue")
    donors = patching.collect(model, red, ["vision.image_features", "layers.*.deepstack_output"])

    def edit(tracer):
        for site in donors:
            patching.replace(tracer, site, donors)

    clean = logits_with(model, red, lambda tracer: None)
    assert torch.equal(logits_with(model, blue, edit), clean)


def test_each_cell_is_the_assignment_written_by_hand(model):
    got = patching.sweep(model, FRANCE, ITALY, layers=[-1, 1], positions=[0, -2, [1, 3]], metric=probe)
    assert got.sites == ("layers.1.layer_output", "layers.5.layer_output") and got.layers == (1, 5)
    assert got.positions == ((0,), (3,), (1, 3)) and got.axis == "seq"
    assert got.tokens == ("The", " Italy", " capital Italy")
    for (row, layer), (column, place) in itertools.product(enumerate((1, 5)), enumerate(([0], [3], [1, 3]))):
        with model.trace(FRANCE):
            donor = model.layers[layer].layer_output.save()
        with model.trace(ITALY):
            model.layers[layer].layer_output[:, place] = donor[:, place]
            expected = probe(model.logits).item()
        assert got.values[row, column] == expected


def test_a_sweep_of_one_run_into_itself_changes_nothing(model):
    for site in ("self_attn.attention_head_outputs", "mlp.mlp_output", "token_embeddings"):
        got = patching.sweep(model, FRANCE, FRANCE, site, metric=probe)
        assert got.values.eq(got.corrupted).all(), site


def test_heads_are_swept_by_position_or_by_head(model):
    site = "self_attn.attention_head_outputs"
    by_head = patching.sweep(model, FRANCE, ITALY, site, layers=2, axis="heads", metric=probe)
    assert by_head.values.shape == (1, model.num_heads) and by_head.tokens == tuple("0123")
    with model.trace(FRANCE):
        donor = model.layers[2].self_attn.attention_head_outputs.save()
    with model.trace(ITALY):
        model.layers[2].self_attn.attention_head_outputs[:, :, 3] = donor[:, :, 3]
        assert by_head.values[0, 3] == probe(model.logits).item()
    every = patching.sweep(model, FRANCE, ITALY, site, layers=2, positions=[range(5)], metric=probe)
    together = patching.sweep(model, FRANCE, ITALY, site, layers=2, positions=[range(4)], axis="heads", metric=probe)
    assert every.values == together.values


def test_image_sites_are_swept_by_row(model):
    red, blue = with_image("red"), with_image("blue")
    got = patching.sweep(model, red, blue, "vision.image_features", metric=("Red", "Blue"))
    assert got.values.shape == (1, 6) and got.axis == "image_tokens" and got.layers == (None,)
    assert got.values.ne(got.corrupted).any()
    tower = patching.sweep(
        model, red, blue, "vision.layers.*.layer_output", positions=[range(0, 4), slice(4, None)], metric=probe
    )
    assert tower.values.shape == (4, 2) and tower.axis == "patches" and tower.layers == (0, 1, 2, 3)
    with model.trace(**red):
        donor = model.vision.layers[1].layer_output.save()
    with model.trace(**blue):
        model.vision.layers[1].layer_output[:, :4] = donor[:, :4]
        assert tower.values[1, 0] == probe(model.logits).item()


def test_recordings_are_taken_for_the_prompts_they_were_made_of(model):
    clean, corrupted = model.record(FRANCE), model.record(ITALY)
    got = patching.sweep(model, clean, corrupted, "mlp.mlp_output", metric=probe)
    assert torch.equal(got.values, patching.sweep(model, FRANCE, ITALY, "mlp.mlp_output", metric=probe).values)


def test_prompts_that_do_not_align_are_refused_with_both_numbers(model):
    for run in (patching.sweep, patching.attribution):
        with pytest.raises(vlscope.InputError, match="5 tokens.* 6"):
            run(model, FRANCE, "The capital of France is is", metric=PAIR)
    wide, small = ({"prompt": "What?", "images": [picture(size=size)]} for size in ((96, 64), (64, 64)))
    with pytest.raises(vlscope.InputError, match="tokens"):
        patching.sweep(model, wide, small, "vision.image_features", metric=PAIR)


def test_what_cannot_be_swept_is_refused_before_anything_runs(model):
    refused = [
        ({"site": "layer_outputs"}, vlscope.UnknownSite, "layer_outputs"),
        ({"site": "vision.image_features"}, vlscope.NotReachedError, "image_features"),
        ({"site": "next_token_probs", "metric": probe}, vlscope.InputError, "batch, vocab_size"),
        ({"positions": [5]}, vlscope.InputError, "seq 5 .*5, 0 to 4"),
        ({"positions": [torch.ones(3, dtype=torch.bool)]}, vlscope.InputError, r"\[3\].* 5 "),
        ({"axis": "heads"}, vlscope.InputError, "heads"),
        ({"metric": (" Paris is", " Rome")}, vlscope.InputError, "2 tokens"),
        ({"metric": " Paris"}, vlscope.InputError, "two tokens"),
        ({"metric": lambda logits: logits[0, -1]}, vlscope.InputError, "one number"),
        ({"corrupted": [ITALY, ITALY]}, vlscope.InputError, "1 clean prompts and 2 corrupted"),
        ({"corrupted": [ITALY, "Two"]}, vlscope.InputError, "have 5, 1 tokens"),
        ({"metric": [PAIR, PAIR]}, vlscope.InputError, "2 pairs of tokens, and there are 1 prompts"),
        ({"metric": [PAIR, " Rome"]}, vlscope.InputError, "two tokens"),
        ({"site": "self_attn.q_proj.output"}, vlscope.InputError, "axis by its number"),
        ({"site": "self_attn.q_proj.output", "axis": 3}, vlscope.InputError, "axis 3 .* 3 axes, 0 to 2"),
    ]
    for change, error, words in refused:
        given = {"clean": FRANCE, "corrupted": ITALY, "metric": PAIR, **change}
        with pytest.raises(error, match=words):
            patching.sweep(model, **given)


def test_a_sweep_shows_no_bar_where_stderr_is_no_terminal(model, capsys):
    patching.sweep(model, FRANCE, ITALY, layers=0, metric=PAIR)
    assert capsys.readouterr() == ("", "")


IMAGES = "self_attn.image_attention_probabilities"


def two_images(color):
    return {"prompt": "What?", "images": [picture(color, size=(96, 64)), picture("green", size=(128, 96))]}


def test_heads_of_the_patterns_of_each_image_are_swept_together(model):
    red, blue = two_images("red"), two_images("blue")
    got = patching.sweep(model, red, blue, f"vision.layers.*.{IMAGES}", axis="heads", metric=probe)
    assert got.values.shape == (4, model.vision.num_heads) and got.axis == "heads"
    with model.trace(**red):
        donor = model.vision.layers[2].self_attn.image_attention_probabilities.save()
    assert len(donor) == 2
    with model.trace(**blue):
        for pattern, new in zip(model.vision.layers[2].self_attn.image_attention_probabilities, donor):
            pattern[1] = new[1]
        assert got.values[2, 1] == probe(model.logits).item()
    itself = patching.sweep(model, blue, blue, f"vision.layers.*.{IMAGES}", axis="heads", metric=probe)
    assert itself.values.eq(itself.corrupted).all()


def test_the_patterns_of_each_image_are_replaced_by_those_of_another_run_or_by_a_function(model):
    red, blue, site = two_images("red"), two_images("blue"), f"vision.layers.1.{IMAGES}"
    donor = patching.collect(model, red, site)
    seen = []

    def by_hand(tracer):
        tracer.vision.layers[1].self_attn.image_attention_probabilities = donor[site]

    def uniform(value, name):
        seen.append(name)
        return torch.full_like(value, 1 / value.shape[-1])

    replaced = logits_with(model, blue, lambda tracer: patching.replace(tracer, site, donor))
    assert torch.equal(replaced, logits_with(model, blue, by_hand))
    logits_with(model, blue, lambda tracer: patching.replace(tracer, site, uniform, query=[0, 3]))
    assert seen == [f"{site}.0", f"{site}.1"]


def test_what_is_several_tensors_is_refused_where_they_are_no_columns_of_one_table(model):
    red, site = two_images("red"), f"vision.layers.*.{IMAGES}"
    one = patching.collect(model, with_image("red"), f"vision.layers.0.{IMAGES}")
    for words, run in (
        ("there are 24 and 48 along axis 1", lambda: patching.sweep(model, red, red, site, metric=PAIR)),
        ("there are 24 and 48 along axis 1", lambda: patching.attribution(model, red, red, site, metric=PAIR)),
        ("several tensors", lambda: patching.mean(model, [red], site)),
        ("2 tensors here.* is 1", lambda: logits_with(model, red, lambda t: patching.replace(t, [*one][0], one))),
    ):
        with pytest.raises(vlscope.InputError, match=words):
            run()


def test_a_native_site_is_swept_along_an_axis_by_its_number(model):
    """v_proj's output is the values before they are parted into heads."""
    native = patching.sweep(model, FRANCE, ITALY, "self_attn.v_proj.output", axis=1, metric=probe)
    named = patching.sweep(model, FRANCE, ITALY, "self_attn.attention_values", metric=probe)
    assert native.axis == "1" and native.tokens == ("0", "1", "2", "3", "4")
    assert torch.equal(native.values, named.values) and native.values.ne(native.corrupted).any()
    estimates = [
        patching.attribution(model, FRANCE, ITALY, site, axis=axis, metric=probe).values
        for site, axis in (("self_attn.v_proj.output", -2), ("self_attn.attention_values", None))
    ]
    torch.testing.assert_close(*estimates)


# --- batches ----------------------------------------------------------------------------------------------------

SPAIN, JAPAN = "The capital of Spain is", "The capital of Japan is"
PAIRS = [PAIR, (" Madrid", " Tokyo")]


def halves(run, pairs=PAIRS):
    """What `run(clean, corrupted, metric)` gives for each of two pairs of prompts, and for both in a batch."""
    first, second = run(FRANCE, ITALY, pairs[0]), run(SPAIN, JAPAN, pairs[1])
    return first, second, run([FRANCE, SPAIN], [ITALY, JAPAN], pairs)


def test_a_sweep_of_a_batch_is_the_mean_of_the_sweeps_of_its_prompts(model):
    def run(clean, corrupted, metric):
        return patching.sweep(model, clean, corrupted, layers=[0, 4], metric=metric)

    first, second, both = halves(run)
    torch.testing.assert_close(both.values, (first.values + second.values) / 2, rtol=1e-4, atol=1e-4)
    assert both.clean == pytest.approx((first.clean + second.clean) / 2, rel=1e-4)
    assert first.tokens == ("The", " capital", " of", " Italy", " is")
    assert both.tokens == ("The", " capital", " of", "3", " is")  # Italy in one, Japan in the other
    same = halves(run, [PAIR, PAIR])[2]
    one = patching.sweep(model, [FRANCE, SPAIN], [ITALY, JAPAN], layers=[0, 4], metric=PAIR)
    assert torch.equal(one.values, same.values)


def test_all_rows_are_run_of_a_batch_and_along_an_axis_by_its_number(model):
    given = {"layers": 4, "metric": PAIR}
    batch = patching.sweep(model, [FRANCE, SPAIN], [ITALY, JAPAN], rows="affected", **given)
    numbered = patching.sweep(model, FRANCE, ITALY, rows="affected", axis=1, **given)
    assert batch.rows == numbered.rows == "all"
    assert torch.equal(batch.values, patching.sweep(model, [FRANCE, SPAIN], [ITALY, JAPAN], **given).values)
    assert torch.equal(numbered.values, patching.sweep(model, FRANCE, ITALY, **given).values)


def test_an_attribution_of_a_batch_is_the_mean_of_those_of_its_prompts(model):
    first, second, both = halves(lambda *prompts: patching.attribution(model, *prompts[:2], metric=prompts[2]))
    torch.testing.assert_close(both.values, (first.values + second.values) / 2, rtol=1e-3, atol=1e-4)


def test_a_path_in_a_batch_is_the_mean_of_the_paths_of_its_prompts(model):
    def run(clean, corrupted, metric):
        ends = "layers.1.mlp.mlp_output", "layers.4.self_attn.attention_values"
        return patching.path(model, clean, corrupted, *ends, metric=metric, sender_at={"seq": -1}, receiver_at={2: -1})

    first, second, both = halves(run)
    assert both == pytest.approx((first + second) / 2, rel=1e-4)


def test_an_ablation_of_a_batch_with_images_takes_a_metric_of_all_its_logits(model):
    def of_both(logits):
        return probe(logits[:1]) + probe(logits[1:])

    batch = [with_image("red"), with_image("blue")]
    got = patching.ablate(model, batch, patching.zero, "mlp.mlp_output", positions=[-1], metric=of_both)
    alone = [
        patching.ablate(model, prompt, patching.zero, "mlp.mlp_output", positions=[-1], metric=probe)
        for prompt in batch
    ]
    torch.testing.assert_close(got.values, alone[0].values + alone[1].values, rtol=1e-4, atol=1e-4)
    features = patching.ablate(model, batch, patching.zero, "vision.image_features", metric=of_both)
    assert features.values.shape == (1, 12)  # the image tokens of the whole batch


def test_the_mean_of_several_prompts_is_put_into_each_prompt_of_a_batch(model):
    means = patching.mean(model, [FRANCE, ITALY], "mlp.mlp_output")
    got = patching.ablate(model, [SPAIN, JAPAN], means, "mlp.mlp_output", positions=[3], metric=PAIR)
    alone = [patching.ablate(model, p, means, "mlp.mlp_output", positions=[3], metric=PAIR) for p in (SPAIN, JAPAN)]
    torch.testing.assert_close(got.values, (alone[0].values + alone[1].values) / 2, rtol=1e-4, atol=1e-4)
    for gather in (patching.mean, patching.resample):
        with pytest.raises(vlscope.InputError, match="batch of 2 prompts"):
            gather(model, [[FRANCE, ITALY]], "mlp.mlp_output")


# --- ablations --------------------------------------------------------------------------------------------------


def test_zero_ablation_is_the_zeros_written_by_hand(model):
    got = patching.ablate(model, FRANCE, patching.zero, "mlp.mlp_output", positions=[2], metric=probe)
    for layer in range(6):

        def edit(tracer, layer=layer):
            tracer.layers[layer].mlp.mlp_output[:, 2] = 0

        assert got.values[layer, 0] == probe(logits_with(model, FRANCE, edit)).item()
    assert got.clean is None and got.corrupted == probe(model(FRANCE).logits).item()
    with pytest.raises(vlscope.InputError, match="no single run"):
        got.recovered


def test_mean_ablation_puts_the_mean_over_prompts_and_positions_there(model):
    prompts = [FRANCE, "Two and three is", ITALY]
    means = patching.mean(model, prompts, "mlp.mlp_output", layers=[1, -1])
    assert list(means) == ["layers.1.mlp.mlp_output", "layers.5.mlp.mlp_output"]
    rows = [patching.collect(model, prompt, "layers.5.mlp.mlp_output")["layers.5.mlp.mlp_output"] for prompt in prompts]
    by_hand = torch.cat([row[0] for row in rows]).mean(0)
    torch.testing.assert_close(means["layers.5.mlp.mlp_output"], by_hand[None, None])

    def edit(tracer):
        tracer.layers[5].mlp.mlp_output[:] = means["layers.5.mlp.mlp_output"]

    got = patching.ablate(model, FRANCE, means, "mlp.mlp_output", layers=-1, positions=[slice(None)], metric=probe)
    assert got.values.item() == probe(logits_with(model, FRANCE, edit)).item()


def test_the_mean_per_position_of_one_prompt_is_its_own_value(model):
    means = patching.mean(model, [FRANCE, FRANCE], per_position=True)
    got = patching.ablate(model, FRANCE, means, metric=probe)
    assert got.values.eq(got.corrupted).all()
    with pytest.raises(vlscope.InputError, match="5.* 6|6.* 5"):
        patching.mean(model, [FRANCE, FRANCE + " is"], per_position=True)


def test_noise_is_seeded_scaled_and_leaves_the_rest_alone(model):
    plain = patching.collect(model, FRANCE, "token_embeddings")["token_embeddings"]
    noised = patching.noise(2.0, seed=1)(plain, "token_embeddings")
    assert torch.equal(noised, patching.noise(2.0, seed=1)(plain, "token_embeddings"))
    assert not torch.equal(noised, patching.noise(2.0, seed=2)(plain, "token_embeddings"))
    assert 0.8 < (noised - plain).std() / (2 * plain.std()) < 1.2
    assert patching.noise(0.0)(plain, "token_embeddings").equal(plain)
    with model.trace(FRANCE) as tracer:
        patching.replace(tracer, "token_embeddings", patching.noise(2.0, seed=1), seq=[1, 2])
        edited = tracer.token_embeddings.save()
    assert torch.equal(edited[:, 1:3], noised[:, 1:3]) and torch.equal(edited[:, [0, 3, 4]], plain[:, [0, 3, 4]])


def test_resample_ablation_puts_the_value_of_one_of_the_prompts_there(model):
    prompts = [ITALY, "The capital of Spain is", "The capital of Japan is"]
    drawn = patching.resample(model, prompts, seed=3)
    assert drawn.keys() == set(sites.expand(model, "layers.*.layer_output"))
    runs = [patching.collect(model, prompt, "layers.*.layer_output") for prompt in prompts]
    chosen = [[torch.equal(drawn[site], run[site]) for run in runs].index(True) for site in drawn]
    assert len(set(chosen)) > 1  # drawn anew for each site
    assert all(torch.equal(a, b) for a, b in zip(drawn.values(), patching.resample(model, prompts, seed=3).values()))
    got = patching.ablate(model, FRANCE, drawn, positions=[slice(None)], metric=probe)
    for value, choice in zip(got.values[:, 0], chosen, strict=True):
        assert value == probe(model(prompts[choice]).logits).item()


def test_replace_takes_any_axes_and_a_function(model):
    def edit(tracer):
        site = "layers.2.self_attn.attention_head_outputs"
        patching.replace(tracer, site, lambda value, name: value.flip(1), heads=[0, 2], seq=slice(1, 4))

    def by_hand(tracer):
        value = tracer.layers[2].self_attn.attention_head_outputs
        value[:, 1:4, [0, 2]] = value.flip(1)[:, 1:4, [0, 2]]

    assert torch.equal(logits_with(model, FRANCE, edit), logits_with(model, FRANCE, by_hand))
    with model.trace(FRANCE), pytest.raises(vlscope.InputError, match="batch, seq, hidden_size"):
        patching.replace(model, "layers.0.layer_output", patching.zero, heads=1)
    with model.trace(FRANCE), pytest.raises(vlscope.InputError, match=r"\[1, 5, 64\].*\[3\]"):
        patching.replace(model, "layers.0.layer_output", lambda value, site: torch.zeros(3))


# --- attribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site, axis",
    [
        ("layer_output", None),
        ("self_attn.attention_head_outputs", "heads"),
        ("self_attn.attention_queries", None),
        ("self_attn.attention_probabilities", None),
        ("vision.layers.*.layer_output", None),
        ("vision.layers.*.self_attn.image_attention_probabilities", "heads"),
        ("vision.image_features", None),
        ("layers.*.deepstack_output", None),
    ],
)
def test_attribution_is_the_derivative_towards_the_clean_value(double, inputs, site, axis):
    corrupted = inputs("dense", "one_image")
    pixels = corrupted["pixel_values"].flip(0)
    clean = {**corrupted, "pixel_values": pixels, "input_ids": corrupted["input_ids"].clone()}
    clean["input_ids"][0, 0] += 1
    got = patching.attribution(double, clean, corrupted, site, metric=probe, axis=axis)
    assert got.values.dtype == torch.float64 and got.values.abs().sum(1).min() > 0
    donors = patching.collect(double, clean, got.sites)
    parts = {f"{name}.{k}": part for name in donors for k, part in enumerate(donors[name])}
    step = 1e-5  # truncation and rounding of the difference quotient are both under 1e-9 here

    def moved(name, place, size):
        with torch.no_grad(), double.trace(**corrupted) as tracer:
            donor = donors | parts  # of a value of several tensors, each goes by its own name
            patching.replace(tracer, name, lambda x, own: x + size * (donor[own] - x), **{got.axis: list(place)})
            return probe(tracer.logits).item()

    choose = torch.Generator().manual_seed(0)
    for row, name in enumerate(got.sites):
        column = torch.randint(len(got.positions), (), generator=choose).item()
        place = got.positions[column]
        measured = (moved(name, place, step) - moved(name, place, -step)) / (2 * step)
        assert got.values[row, column].item() == pytest.approx(measured, rel=1e-6, abs=1e-8), name


def test_attribution_of_a_linear_path_is_the_patch_itself(double, inputs):
    corrupted = inputs("dense", "text")
    clean = {**corrupted, "input_ids": corrupted["input_ids"].flip(1)}
    given = {"site": "logits", "metric": probe}
    estimate = patching.attribution(double, clean, corrupted, **given)
    swept = patching.sweep(double, clean, corrupted, **given)
    torch.testing.assert_close(estimate.values, swept.values - swept.corrupted)
    assert estimate.clean == swept.clean and estimate.corrupted == swept.corrupted


def test_attribution_at_the_logits_of_a_pair_of_tokens_is_refused(model):
    with pytest.raises(vlscope.InputError, match="logits holds the last position alone"):
        patching.attribution(model, FRANCE, ITALY, "logits", metric=PAIR)


def test_attribution_leaves_the_callers_grad_mode_alone(model):
    with torch.no_grad():
        got = patching.attribution(model, FRANCE, ITALY, metric=PAIR)
    assert got.values.shape == (6, 5) and not got.values.requires_grad
    assert got.tokens == ("The", " capital", " of", " Italy", " is")


# --- knockout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_knockout_equals_zeroing_the_probabilities_and_renormalising(vlscope_model, attention):
    model = vlscope_model("demo", attention)

    def edit(tracer):
        patching.knockout(tracer, [1, -1], queries=-1, keys=[1, 3], heads=[0, 2])

    def by_hand(tracer):
        for layer in (1, 5):
            pattern = tracer.layers[layer].self_attn.attention_probabilities
            for head in (0, 2):
                row = pattern[0, head, -1]
                row[[1, 3]] = 0
                row /= row.sum()

    got = logits_with(model, FRANCE, edit)
    assert torch.equal(got, logits_with(model, FRANCE, by_hand))
    assert not torch.equal(got, model(FRANCE).logits)


def test_a_knockout_equals_scores_of_minus_infinity(model):
    def edit(tracer):
        patching.knockout(tracer, range(2, 5), queries=slice(3, None), keys=3)

    def by_hand(tracer):
        for layer in range(2, 5):
            tracer.layers[layer].self_attn.attention_scores[:, :, 3:, 3] = float("-inf")

    torch.testing.assert_close(logits_with(model, FRANCE, edit), logits_with(model, FRANCE, by_hand))


def test_a_knockout_of_what_is_masked_anyway_changes_no_bit(model):
    plain = model(FRANCE).logits
    assert torch.equal(logits_with(model, FRANCE, lambda t: patching.knockout(t, queries=1, keys=[2, 3, 4])), plain)


def test_a_row_left_without_keys_gives_nothing(model):
    with model.trace(FRANCE) as tracer:
        patching.knockout(tracer, 0, queries=2, heads=1)
        heads = tracer.layers[0].self_attn.attention_head_outputs.save()
    assert heads[0, 2, 1].count_nonzero() == 0 and heads.isfinite().all() and heads[0, 3, 1].count_nonzero() > 0


def test_windows_lie_around_each_block_and_end_with_the_model(model):
    assert [list(window) for window in patching.windows(model, 3)] == [
        [0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
        [4, 5],
    ]
    assert [list(window) for window in patching.windows(model, 1)] == [[i] for i in range(6)]


# --- path patching ----------------------------------------------------------------------------------------------


def test_with_nothing_frozen_a_path_to_the_next_stream_equals_patching_the_sender(model):
    sender = "layers.1.self_attn.attention_head_outputs"
    for at in ({}, {"heads": 2}, {"heads": [0, 1], "seq": [1, 4]}):
        got = patching.path(model, FRANCE, ITALY, sender, "layers.4.layer_input", metric=probe, sender_at=at, freeze=[])
        donor = patching.collect(model, FRANCE, sender)
        with model.trace(ITALY) as tracer:
            patching.replace(tracer, sender, donor, **at)
            expected = tracer.logits.save()
        assert got == probe(expected).item(), at


def test_an_edit_that_stands_is_made_in_every_run_of_a_path(model):
    sender = "layers.1.self_attn.attention_output"
    with model.edit(["layers.0.mlp.mlp_output", "layers.3.mlp.mlp_output"], torch.zero_):
        got = patching.path(model, FRANCE, ITALY, sender, "layers.4.layer_input", metric=probe, freeze=[])
        donor = patching.collect(model, FRANCE, sender)
        with model.trace(ITALY) as tracer:
            patching.replace(tracer, sender, donor)
            expected = probe(tracer.logits).item()
    assert got == expected
    assert got != patching.path(model, FRANCE, ITALY, sender, "layers.4.layer_input", metric=probe, freeze=[])


def test_a_path_through_every_reader_of_one_block_equals_patching_its_input(model):
    readers = [f"layers.3.self_attn.attention_{name}" for name in ("queries", "keys", "values")]
    got = patching.path(model, FRANCE, ITALY, "layers.2.layer_output", readers, metric=probe)
    with model.trace(FRANCE):
        donor = model.layers[3].input_layernorm.output.save()
    with model.trace(ITALY):
        model.layers[3].input_layernorm.output = donor
        expected = probe(model.logits).item()
    assert got == expected


def test_the_direct_path_to_the_end_adds_the_difference_to_the_final_stream(double, inputs):
    corrupted = inputs("dense", "text")
    clean = {**corrupted, "input_ids": corrupted["input_ids"].flip(1)}
    for sender in ("layers.0.mlp.mlp_output", "layers.2.self_attn.attention_output"):
        got = patching.path(double, clean, corrupted, sender, "norm.input", metric=probe)
        there, here = (patching.collect(double, run, [sender, "norm.input"]) for run in (clean, corrupted))
        stream = here["norm.input"] + there[sender] - here[sender]
        assert got == pytest.approx(probe(double.project_on_vocab(stream)).item(), rel=1e-9)
        direct = patching.path(double, clean, corrupted, sender, "logits", metric=probe)
        assert direct == pytest.approx(got, rel=1e-9)


def test_frozen_attention_lets_the_sender_pass_through_the_mlps_alone(model):
    sender, freeze = "layers.2.layer_output", ["layers.*.self_attn.attention_output"]
    got = patching.path(model, FRANCE, ITALY, sender, "norm.input", metric=probe, freeze=freeze)
    donor = patching.collect(model, FRANCE, sender)
    held = patching.collect(model, ITALY, "layers.3:.self_attn.attention_output")

    def by_hand(tracer):
        tracer.layers[2].layer_output = donor[sender]
        for layer in (3, 4, 5):
            tracer.layers[layer].self_attn.attention_output = held[f"layers.{layer}.self_attn.attention_output"]

    assert got == probe(logits_with(model, ITALY, by_hand)).item()


def test_receivers_that_are_frozen_do_not_reach_each_other(model):
    """Each receiver is noted with the earlier ones held, so together they are their single notes."""
    receivers = ["layers.3.self_attn.attention_output", "layers.4.mlp.mlp_output"]
    sender = "layers.2.mlp.mlp_output"
    got = patching.path(model, FRANCE, ITALY, sender, receivers, metric=probe)
    base = patching.collect(model, ITALY, ["layers.3:5.self_attn.attention_output", "layers.3:5.mlp.mlp_output"])
    donor = patching.collect(model, FRANCE, sender)
    noted = {}
    for receiver in receivers:
        with model.trace(ITALY) as tracer:
            patching.replace(tracer, sender, donor)
            for site in base:
                if model.order(site) < model.order(receiver):
                    patching.replace(tracer, site, base)
            noted[receiver] = sites.read(tracer, receiver).save()

    def edit(tracer):
        for receiver in receivers:
            patching.replace(tracer, receiver, noted)

    assert got == probe(logits_with(model, ITALY, edit)).item()


def test_a_path_from_the_tower_to_the_text_is_followed(model):
    red, blue = with_image("red"), with_image("blue")
    got = patching.path(model, red, blue, "vision.image_features", "layers.0.layer_input", metric=probe)
    swept = patching.sweep(model, red, blue, "vision.image_features", positions=[slice(None)], metric=probe)
    assert got == swept.values.item()


def test_a_path_backwards_is_refused_naming_both_ends(model):
    with pytest.raises(vlscope.InputError, match=r"layers.1.layer_output comes before layers.2.layer_output"):
        patching.path(model, FRANCE, ITALY, "layers.2.layer_output", "layers.1.layer_output", metric=probe)
    with pytest.raises(vlscope.InputError, match="2 sites"):
        patching.path(model, FRANCE, ITALY, "layers.:2.layer_output", "logits", metric=probe)


# --- generation -------------------------------------------------------------------------------------------------


def test_edits_of_an_open_trace_work_in_the_steps_of_a_generation(model):
    """A knockout of one key in every step equals the assignment to the pattern by hand."""

    def by_hand():
        for layer in model.layers:
            pattern = layer.self_attn.attention_probabilities
            pattern[..., -1, 3] = 0
            pattern[..., -1, :] /= pattern[..., -1, :].sum(-1, keepdim=True)

    found = []
    for edit in (lambda: patching.knockout(model, queries=-1, keys=3), by_hand):
        with model.generate("The day after Monday is", max_new_tokens=3) as tracer:
            found.append([(edit(), model.logits.clone())[1] for step in tracer.iter[:]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
