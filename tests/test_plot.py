"""Pictures: what lies in the artists is what the model gave, at its place on the image."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

import vlscope
from vlscope import patching, plot
from vlscope.demo import picture
from vlscope.pictures import pictured

PACKAGE = Path(vlscope.__file__).parents[1]
QUESTION = "What color is the square?"
RED, TALL = picture("red", size=(128, 96)), picture("blue", "circle", size=(64, 128))
TWO = {"prompt": "Which is red?", "images": [RED, TALL]}
BOTH = {"prompt": QUESTION, "images": [RED]}
CLEAN, CORRUPTED = "The capital of France is", "The capital of Italy is"
CAPITALS = (" Paris", " Rome")


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


def shown(figure):
    """The panels that show something, in the order of drawing, without the bar of colours."""
    return [axes for axes in figure.axes if axes.images]


def maps(figure):
    """Of each panel with a map, what it shows: [(title, [rows, columns])]."""
    return [
        (axes.get_title(), np.asarray(axes.images[1].get_array())) for axes in shown(figure) if len(axes.images) == 2
    ]


def noise(size, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def close(ours, theirs):
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-6)


# --- what lies under a map ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, side", [("demo", 32), ("qwen2_5", 28), ("qwen2", 28)])
def test_the_pixels_of_an_image_come_back_from_its_patches(vlscope_model, name, side):
    images = [noise((4 * side, 3 * side)), noise((2 * side, 4 * side), 1)]
    seen = pictured(vlscope_model(name), QUESTION, images=images).seen
    for given, item in zip(images, seen, strict=True):
        assert np.array_equal(item.pixels, np.asarray(given)[None])


def test_a_resized_image_is_shown_as_the_model_sees_it(model):
    (item,) = pictured(model, QUESTION, images=[RED.resize((200, 110))]).seen
    assert item.pixels.shape == (1, 64, 160, 3) and item.tokens.size == (160, 64)
    assert item.pixels[0, 32, 80].tolist() == [255, 0, 0] and item.pixels[0, 2, 2].tolist() == [255] * 3


def test_each_temporal_patch_of_a_video_shows_its_first_frame_under_its_own_map(model):
    frames = [noise((64, 96), seed) for seed in range(4)]
    inputs = {"videos": [frames], "video_metadata": [{"fps": 4}], "do_sample_frames": False}
    prompt = pictured(model, QUESTION, **inputs)
    assert np.array_equal(prompt.seen[0].pixels, np.stack([np.asarray(frames[0]), np.asarray(frames[2])]))
    values = torch.arange(12.0)
    figure = plot.token_map(model, values, QUESTION, **inputs)
    assert [axes.get_title() for axes in shown(figure)] == ["video, frame 0", "", "video, frame 1", ""]
    for (_, drawn), expected in zip(maps(figure), values.reshape(2, 3, 2), strict=True):
        close(drawn, expected)


def test_image_and_map_cover_the_same_pixels_from_the_left_upper_corner(model):
    for axes in shown(plot.attention(model, **TWO, layers=3)):
        width, height = (128, 96) if axes.get_position().y0 > 0.5 else (64, 128)
        for image in axes.images:
            assert image.get_extent() == [0, width, height, 0]
        assert axes.get_xlim() == (0, width) and axes.get_ylim() == (height, 0)
        under = axes.images[0].get_array()
        assert under.shape == (height, width, 3)
        if len(axes.images) == 2:  # grey, and paler than the image
            assert (under[..., 0] == under[..., 1]).all() and under.min() > 150


# --- attention ---------------------------------------------------------------------------------------------------


def patterns(model, inputs):
    with model.trace(**inputs):
        return [layer.self_attn.attention_probabilities[0] for layer in model.layers]


def test_a_map_of_attention_holds_the_share_of_each_token_on_its_place(model):
    figure = plot.attention(model, **TWO, layers=[2, 4], token=-3)
    drawn, expected = maps(figure), patterns(model, TWO)
    images = model.image_tokens(**TWO)
    order = [(image, layer) for image in images for layer in (2, 4)]
    assert len(drawn) == 4
    for (title, values), (image, layer) in zip(drawn, order, strict=True):
        row = expected[layer][:, -3].mean(0)
        assert values.shape == image.shape[1:]
        for token in range(len(image)):
            _, line, column = image.place(token)
            close(values[line, column], row[image.positions[token]])
        assert title == f"block {layer}: {row[image.positions].sum():.0%}"
    assert "mean of 4 heads" in figure.get_suptitle() and "assistant" not in figure.get_suptitle()


def test_each_head_that_is_asked_for_has_a_map_of_its_own(model):
    drawn = maps(plot.attention(model, **BOTH, layers=[0, 3], heads=[1, 3]))
    expected = patterns(model, BOTH)
    (image,) = model.image_tokens(**BOTH)
    for (title, values), (layer, head) in zip(drawn, [(0, 1), (0, 3), (3, 1), (3, 3)], strict=True):
        assert title.startswith(f"block {layer}, head {head}: ")
        close(values.flatten(), expected[layer][head, -1, image.positions])


def test_a_token_counts_in_the_prompt_whatever_the_padding(model):
    plain, encoding = maps(plot.attention(model, **BOTH, layers=3, token=20)), model.encode(**BOTH)
    pad = torch.tensor([[695] * 5])
    encoding["input_ids"] = torch.cat([pad, encoding["input_ids"]], 1)
    encoding["attention_mask"] = torch.cat([pad * 0, torch.ones_like(encoding["input_ids"][:, 5:])], 1)
    padded = plot.attention(model, encoding, layers=3, token=20)
    close(maps(padded)[0][1], plain[0][1])
    assert "token 20" in padded.get_suptitle()


def test_attention_is_of_the_edited_forward_where_edits_stand(model):
    before = maps(plot.attention(model, **BOTH, layers=4))
    with model.edit("layers.4.self_attn.attention_queries", lambda value: value.zero_()):
        after = maps(plot.attention(model, **BOTH, layers=4))
    assert not np.allclose(before[0][1], after[0][1])
    close(after[0][1], np.full((3, 4), 1 / 28))


def test_blocks_without_such_an_attention_are_passed_over(vlscope_model):
    hybrid = vlscope_model("hybrid")
    expected = [f"block {k}" for k in range(hybrid.num_layers) if hasattr(hybrid.layers[k], "self_attn")]
    titles = [title.partition(":")[0] for title, _ in maps(plot.attention(hybrid, **BOTH))]
    assert titles == expected and 0 < len(expected) < hybrid.num_layers


# --- the logit lens ----------------------------------------------------------------------------------------------


def test_the_lens_shows_the_likeliest_token_of_each_place_and_its_probability(model):
    figure = plot.logit_lens(model, **TWO, layers=[1, 5])
    with model.trace(**TWO):
        streams = [model.layers[layer].layer_output[0].clone() for layer in (1, 5)]
        logits = model.logits[0]
    images = model.image_tokens(**TWO)
    panels = [axes for axes in shown(figure) if len(axes.images) == 2]
    for axes, (image, index) in zip(panels, [(i, k) for i in images for k in (0, 1)], strict=True):
        scores = model.project_on_vocab(streams[index][image.positions])
        best = scores.softmax(-1).max(-1)
        close(axes.images[1].get_array().flatten(), best.values)
        assert [text.get_text() for text in axes.texts] == [
            text if len(text) <= 9 else text[:8] + "…"
            for text in (model.tokenizer.decode([token]).strip() for token in best.indices.tolist())
        ]
        centers = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in map(image.box, range(len(image)))]
        assert [text.get_position() for text in axes.texts] == centers
        if index == 1:  # the last block
            assert best.indices.tolist() == logits[image.positions].argmax(-1).tolist()


def test_the_lens_for_one_token_shows_its_probability_everywhere(model):
    (red,) = model.tokenizer.encode("Red")
    with model.trace(**BOTH):
        expected = model.project_on_vocab(model.layers[4].layer_output[0]).softmax(-1)[:, red]
    (image,) = model.image_tokens(**BOTH)
    for token in ("Red", red):
        ((title, values),) = maps(plot.logit_lens(model, **BOTH, layers=4, token=token))
        assert title == "block 4"
        close(values.flatten(), expected[image.positions])
    with pytest.raises(vlscope.InputError, match="'Red square' is . tokens"):
        plot.logit_lens(model, **BOTH, token="Red square")


# --- patches -----------------------------------------------------------------------------------------------------


def test_the_norm_of_each_patch_lies_on_the_patch(model):
    drawn = maps(plot.patch_norms(model, **TWO, layers=[0, 2]))
    with model.trace(**TWO):
        norms = [model.vision.layers[k].layer_output[0].norm(dim=-1) for k in (0, 2)]
    images = model.image_tokens(**TWO)
    for (_, values), (image, norm) in zip(drawn, [(i, n) for i in images for n in norms], strict=True):
        assert values.shape == image.grid[1:]
        for patch in range(image.patches.start, image.patches.stop):
            _, row, column = image.patch_place(patch)
            close(values[row, column], norm[patch])


@pytest.mark.parametrize("site", ["layer_input", "vision.patch_embeddings"])
@pytest.mark.parametrize("name, side", [("qwen2_5", 14), ("demo", 16)])
def test_painting_a_patch_changes_the_map_there_alone_also_where_windows_reorder_it(vlscope_model, name, side, site):
    model, size = vlscope_model(name), (10 * side, 6 * side)
    layers = None if site.startswith("vision") else 0
    image = Image.new("RGB", size, "grey")
    ((_, before),) = maps(plot.patch_norms(model, QUESTION, images=[image], layers=layers, site=site))
    for row, column in ((0, 4), (3, 9), (5, 1)):
        painted = image.copy()
        ImageDraw.Draw(painted).rectangle(
            [column * side, row * side, (column + 1) * side - 1, (row + 1) * side - 1], "red"
        )
        ((_, after),) = maps(plot.patch_norms(model, QUESTION, images=[painted], layers=layers, site=site))
        assert np.argwhere(before != after).tolist() == [[row, column]]


def test_numbers_of_patches_are_laid_by_the_stream_or_by_the_order_before_windows(vlscope_model):
    model = vlscope_model("qwen2_5")
    image = noise((140, 84))
    (tokens,) = model.image_tokens(QUESTION, images=[image])
    values = torch.arange(60.0)
    drawn = [
        maps(plot.patch_map(model, values, QUESTION, images=[image], windowed=windowed)) for windowed in (True, False)
    ]
    close(drawn[0][0][1], tokens.patch_map[0])
    assert drawn[1][0][1][0].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]
    assert not np.array_equal(drawn[0][0][1], drawn[1][0][1])


# --- numbers of the caller's -------------------------------------------------------------------------------------


def test_numbers_by_position_and_by_image_token_give_the_same_maps(model):
    length, (first, second) = 38, model.image_tokens(**TWO)
    values = torch.randn(2, length)
    whole = maps(plot.token_map(model, values, **TWO, titles=["a", "b"]))
    own = values[:, torch.cat([first.positions, second.positions])]
    assert [title for title, _ in whole] == ["a", "b"] * 2
    for (_, left), (_, right) in zip(whole, maps(plot.token_map(model, own, **TWO)), strict=True):
        assert np.array_equal(left, right)
    close(whole[2][1], values[0, second.positions].reshape(4, 2))


def test_all_maps_of_a_picture_share_one_scale_from_zero_and_nothing_is_transparent_but_nothing(model):
    values = torch.tensor([[0.0] * 11 + [0.5], [0.0] * 11 + [2.0]])
    for sign, ends in ((1, (0, 2)), (-1, (-2, 2))):
        figure = plot.token_map(model, sign * values, **BOTH)
        drawn = [axes.images[1] for axes in shown(figure) if len(axes.images) == 2]
        assert {image.norm for image in drawn} == {drawn[0].norm}
        assert (drawn[0].norm.vmin, drawn[0].norm.vmax) == ends
        colors = [drawn[0].to_rgba(np.array([value]))[0] for value in (0, sign, sign * 2)]
        assert colors[0][3] == pytest.approx(0, abs=0.02)
        assert 0.4 < colors[1][3] < colors[2][3] < 1


def test_more_and_less_have_colours_of_their_own(model):
    figure = plot.token_map(model, [1.0, -1.0] * 6, **BOTH)
    image = maps_of(figure)[0]
    more, less = (to_hex(image.to_rgba(np.array([value]))[0]) for value in (1, -1))
    assert int(more[1:3], 16) > int(more[5:7], 16) and int(less[1:3], 16) < int(less[5:7], 16)


def maps_of(figure):
    return [axes.images[1] for axes in shown(figure) if len(axes.images) == 2]


def test_what_does_not_fit_is_refused_with_both_numbers(model):
    with pytest.raises(vlscope.InputError, match="7 values.*28 positions.*12 image tokens"):
        plot.token_map(model, torch.zeros(7), **BOTH)
    with pytest.raises(vlscope.InputError, match="7 values.*48 patches"):
        plot.patch_map(model, torch.zeros(7), **BOTH)
    with pytest.raises(vlscope.InputError, match="1 titles and 2 maps"):
        plot.token_map(model, torch.zeros(2, 12), **BOTH, titles=["a"])
    with pytest.raises(vlscope.InputError, match="scale is 'rainbow'.*'share'"):
        plot.token_map(model, torch.zeros(12), **BOTH, scale="rainbow")
    with pytest.raises(vlscope.InputError, match="one prompt; this input has 2"):
        plot.attention(model, [QUESTION, QUESTION], images=[[RED], [TALL]])
    with pytest.raises(vlscope.InputError, match="no image"):
        plot.attention(model, QUESTION)
    with pytest.raises(vlscope.InputError, match="token 28: the prompt has 28, 0 to 27"):
        plot.attention(model, **BOTH, token=28)
    with pytest.raises(vlscope.UnknownSite):
        plot.attention(model, **BOTH, layers=99)


# --- heat maps ---------------------------------------------------------------------------------------------------


def labels(axis):
    return [(tick, text.get_text()) for tick, text in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)]


def test_a_sweep_draws_what_each_cell_recovers_by_block_and_token(model):
    cells = patching.sweep(model, CLEAN, CORRUPTED, "layer_input", [1, 4], metric=CAPITALS, progress=False)
    axes = shown(cells.plot())[0]
    close(axes.images[0].get_array(), cells.recovered)
    assert labels(axes.yaxis) == [(0, "1"), (1, "4")] and axes.get_ylabel() == "block"
    assert labels(axes.xaxis) == list(enumerate(["The", " capital", " of", " Italy", " is"]))
    assert axes.get_title() == "layers.*.layer_input"
    assert axes.yaxis_inverted()  # the first block on top
    norm = axes.images[0].norm
    assert -norm.vmin == norm.vmax == max(1.0, cells.recovered.abs().max())


def test_a_sweep_over_an_image_labels_its_run_of_tokens_once(model):
    blue = {"prompt": QUESTION, "images": [picture("blue", size=(128, 96))]}
    cells = patching.sweep(model, BOTH, blue, layers=2, metric=("Red", "Blue"), progress=False)
    named = dict(labels(shown(cells.plot())[0].xaxis))
    first, last = cells.tokens.index("<|image_pad|>"), 27 - cells.tokens[::-1].index("<|image_pad|>")
    assert named[(first + last) / 2] == "<|image_pad|> × 12"
    assert named[first - 1] == "<|vision_start|>" and named[last + 1] == "<|vision_end|>"
    assert len(named) == 28 - 11


def test_an_ablation_draws_changes_and_an_attribution_the_share_that_it_estimates(model):
    ablated = patching.ablate(model, CLEAN, patching.zero, "mlp.mlp_output", metric=CAPITALS, progress=False)
    close(shown(ablated.plot())[0].images[0].get_array(), ablated.values - ablated.corrupted)
    estimated = patching.attribution(model, CLEAN, CORRUPTED, metric=CAPITALS)
    assert torch.equal(estimated.effects, estimated.values)
    share = estimated.values / (estimated.clean - estimated.corrupted)
    close(shown(estimated.plot())[0].images[0].get_array(), share)


def test_other_sites_and_axes_are_labelled_by_their_names(model):
    heads = patching.ablate(
        model,
        CLEAN,
        patching.zero,
        "self_attn.attention_head_outputs",
        0,
        axis="heads",
        metric=CAPITALS,
        progress=False,
    )
    axes = shown(heads.plot())[0]
    assert axes.get_xlabel() == "heads" and [text for _, text in labels(axes.xaxis)] == ["0", "1", "2", "3"]
    whole = patching.ablate(
        model, CLEAN, patching.zero, "token_embeddings", positions=[slice(2)], metric=CAPITALS, progress=False
    )
    axes = shown(whole.plot())[0]
    assert labels(axes.yaxis) == [(0, "token_embeddings")] and axes.get_ylabel() == ""
    assert labels(axes.xaxis) == [(0, "The capital")]


def test_labels_that_do_not_fit_the_values_are_refused():
    with pytest.raises(vlscope.InputError, match=r"\[2, 3\].*\[2, 4\]"):
        plot.heat_map(torch.zeros(2, 3), rows="ab", columns="abcd")
    with pytest.raises(vlscope.InputError, match=r"\[0, 0\]"):
        plot.heat_map(torch.zeros(0, 0), rows=[], columns=[])


def test_the_labels_of_a_long_prompt_do_not_lie_on_each_other():
    figure = plot.heat_map(torch.zeros(94, 800), rows=range(94), columns=[f"word{k}" for k in range(800)])
    figure.draw_without_rendering()
    axes = shown(figure)[0]
    for axis, side in ((axes.xaxis, "width"), (axes.yaxis, "height")):
        boxes = [text.get_window_extent() for text in axis.get_ticklabels()]
        assert len(boxes) > 20
        edges = sorted((box.x0, box.x1) if side == "width" else (box.y0, box.y1) for box in boxes)
        assert all(before[1] <= after[0] for before, after in zip(edges, edges[1:]))


# --- figures -----------------------------------------------------------------------------------------------------


def test_a_picture_can_be_drawn_into_a_part_of_a_figure(model):
    figure = Figure(figsize=(10, 4))
    left, right = figure.subfigures(1, 2)
    assert plot.attention(model, **BOTH, layers=3, figure=left) is left
    plot.heat_map(torch.zeros(2, 3), rows="ab", columns="abc", figure=right)
    assert len(maps(left)) == 1 and len(shown(right)) == 1 and len(shown(figure)) == 3


def test_a_picture_shows_itself_in_a_notebook(model):
    figure = plot.patch_norms(model, **BOTH, layers=0)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_pictures_name_what_to_install_and_the_rest_works(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    script = """
import vlscope
vlscope.patching.Cells
try:
    vlscope.plot.attention
except vlscope.MissingPackage as error:
    print(isinstance(error, ImportError), error)
"""
    command = [sys.executable, "-c", script]
    env = {"PYTHONPATH": f"{tmp_path}:{PACKAGE}", "PATH": "/usr/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "True pictures need matplotlib (not here): pip install 'vlscope[plot]'\n", done.stderr
