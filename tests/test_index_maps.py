"""Patches, image tokens, pixels and rows of a batch, against the processor and against single runs."""

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
import vlscope
from sites import difference
from vlscope import _core, patching
from vlscope.demo import picture
from vlscope.index_maps import ImageTokens

QUESTION = "What color is the square?"
SIZES = [(96, 64), (64, 128), (32, 160)]


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


def grey(size):
    return Image.new("RGB", size, "grey")


def only(images):
    (image,) = images
    return image


# --- one image --------------------------------------------------------------------------------------------------


def changed_rows(model, size, box):
    """The patches whose pixels change when a box of an image is painted."""
    painted = grey(size)
    painted.paste("red", box)
    before, after = (model.encode(QUESTION, images=[image])["pixel_values"] for image in (grey(size), painted))
    return (before != after).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("size", SIZES)
def test_painting_the_box_of_a_token_changes_exactly_its_patches(model, size):
    image = only(model.image_tokens(QUESTION, images=[grey(size)]))
    assert image.size == size  # no resize, so a box is in pixels of the picture itself
    for token in range(len(image)):
        assert changed_rows(model, size, image.box(token)) == image.patches_of(token).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_painting_the_box_of_a_patch_changes_that_row_alone(model, size):
    image = only(model.image_tokens(QUESTION, images=[grey(size)]))
    for patch in range(image.patches.start, image.patches.stop):
        assert changed_rows(model, size, image.patch_box(patch)) == [patch]


def test_a_box_of_the_original_is_where_it_lies_before_the_resize(model):
    original = (150, 70)
    image = only(model.image_tokens(QUESTION, images=[grey(original)]))
    assert image.size != original
    token = image.token_at(1, 2)
    box = image.box(token, size=original)
    assert [a / b for a, b in zip(box, original * 2)] == [a / b for a, b in zip(image.box(token), image.size * 2)]
    left, top, right, bottom = box
    assert image.token_at_pixel((left + right) / 2, (top + bottom) / 2, size=original) == token
    inner = tuple(round(side + grow) for side, grow in zip(box, (4, 4, -4, -4)))
    changed = set(changed_rows(model, original, inner))
    assert changed and changed >= set(image.patches_of(token).tolist())
    assert all(0 <= a <= b for a, b in zip(image.box(len(image) - 1, size=original)[2:], original))


def test_a_pixel_lies_in_the_token_whose_box_holds_it(model):
    image = only(model.image_tokens(QUESTION, images=[grey((96, 64))]))
    for token in range(len(image)):
        left, top, right, bottom = image.box(token)
        for x, y in ((left, top), (right - 1, bottom - 1)):
            assert image.token_at_pixel(x, y) == token
    with pytest.raises(vlscope.InputError, match=r"\(96, 0\).*96 x 64"):
        image.token_at_pixel(96, 0)


def test_tokens_stand_at_the_placeholders_and_rows_at_the_features(model):
    images = model.image_tokens(QUESTION, images=[grey(size) for size in SIZES])
    with model.trace(QUESTION, images=[grey(size) for size in SIZES]):
        mask = model.vision.image_token_mask.save()
        features = model.vision.image_features.save()
        entering = model.layers[0].layer_input.save()
    assert [image.shape for image in images] == [(1, h // 32, w // 32) for w, h in SIZES]
    assert torch.cat([image.positions for image in images]).tolist() == mask[0].nonzero().flatten().tolist()
    assert images[-1].rows.stop == len(features) and images[0].rows.start == 0
    for image in images:
        assert torch.equal(entering[image.prompt, image.positions], features[image.rows])
        assert torch.equal(entering[image.prompt, image.span], features[image.rows])


def test_each_token_is_made_of_its_four_patches_alone(model):
    pictures = [picture("red", size=(96, 64)), picture("blue", size=(64, 64))]
    encoding = model.encode(QUESTION, images=pictures)
    plain = patching.collect(model, encoding, "projector.output")["projector.output"]
    second = model.image_tokens(**encoding)[1]
    for token in (0, 3):
        with model.trace(**encoding):
            model.projector.input[second.patches_of(token)] += 1
            features = model.vision.image_features.save()
        changed = (features != plain).any(1).nonzero().flatten().tolist()
        assert changed == [second.rows.start + token]


def test_the_patch_map_puts_the_stream_in_raster_order(model):
    """A picture whose patches are of one grey each, in the order of reading."""
    height, width = 4, 6
    levels = np.arange(height * width, dtype=np.uint8).reshape(height, width) * 10
    pixels = np.repeat(np.repeat(levels, 16, 0), 16, 1)
    encoding = model.encode(QUESTION, images=[np.stack([pixels] * 3, 2)])
    image = only(model.image_tokens(**encoding))
    raster = encoding["pixel_values"][image.patch_map].mean(-1)
    assert raster.shape == (1, height, width)
    assert raster.flatten().argsort().tolist() == list(range(height * width))
    assert image.patch_map[0, 0].tolist() == [0, 1, 4, 5, 8, 9] and image.patch_map[0, 1].tolist()[:4] == [2, 3, 6, 7]


# --- the arithmetic, on grids of several frames ------------------------------------------------------------------


@pytest.fixture(params=[((3, 4, 6), 2), ((2, 6, 3), 3), ((1, 4, 4), 1), ((2, 6, 10), 2, 2)], ids=str)
def frames(request):
    """A grid, its merge size, and the side of its windows in tokens if it has any."""
    grid, merge, *side = request.param
    count = grid[0] * grid[1] * grid[2]
    tokens = count // merge**2
    rows, patches = slice(5, 5 + tokens), slice(20, 20 + count)
    blocks = _core.window_places(grid, merge, *side) if side else torch.arange(tokens)
    return ImageTokens("video", 0, 0, grid, merge, 10, torch.arange(tokens) + 7, rows, rows, patches, blocks)


def test_places_and_indices_are_each_others_inverse(frames):
    tokens = torch.arange(len(frames))
    frame, row, column = frames.place(tokens)
    assert torch.equal(frames.token_at(row, column, frame), tokens)
    patches = torch.arange(frames.patches.start, frames.patches.stop)
    frame, row, column = frames.patch_place(patches)
    assert torch.equal(frames.patch_at(row, column, frame), patches)
    assert [int(x) for x in frames.place(int(tokens[-1]))] == [size - 1 for size in frames.shape]


def test_every_patch_belongs_to_the_token_around_it(frames):
    patches = torch.arange(frames.patches.start, frames.patches.stop)
    tokens = frames.token_of(patches)
    own = frames.patches_of(torch.arange(len(frames)))
    assert torch.equal(own.flatten().sort().values, patches)
    assert torch.equal(frames.token_of(own), torch.arange(len(frames))[:, None].expand_as(own))
    outer, inner = frames.box(tokens), frames.patch_box(patches)
    for k in range(2):
        assert (outer[k] <= inner[k]).all() and (inner[k + 2] <= outer[k + 2]).all()
    assert torch.equal(frames.place(tokens)[0], frames.patch_place(patches)[0])


def test_numbers_and_tensors_give_the_same(frames):
    for token in range(len(frames)):
        assert [int(x) for x in frames.box(torch.tensor(token))] == list(frames.box(token))
        assert frames.patches_of(token).tolist() == frames.patches_of(torch.tensor([token]))[0].tolist()
    assert frames.token_at(-1, -1, -1) == len(frames) - 1


def test_what_is_not_there_is_refused_with_the_number_there_is(frames):
    for wrong in (lambda: frames.box(len(frames)), lambda: frames.token_at(99, 0), lambda: frames.patch_at(0, -99)):
        with pytest.raises(vlscope.InputError, match="there are"):
            wrong()
    for patch in (frames.patches.start - 1, frames.patches.stop, torch.tensor([0])):
        with pytest.raises(vlscope.InputError, match="not of video 0"):
            frames.token_of(patch)


# --- batches ----------------------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", QUESTION, "Are the two the same?"]
IMAGES = [[], [picture("red", size=(96, 64))], [picture("blue", size=(64, 64)), picture("green", size=(128, 32))]]
STREAM = ["token_embeddings", "layers.*.layer_input", "layers.*.layer_output", "layers.*.mlp.mlp_output", "logits"]
HEADS = ["layers.*.self_attn.attention_queries", "layers.*.self_attn.attention_keys"]
FEATURES = ["vision.image_features", "layers.*.deepstack_output"]
TOWER = ["vision.layers.*.layer_output", "vision.patch_embeddings"]


@pytest.fixture(scope="module", params=["dense", "demo"])
def batch(request, vlscope_model):
    """A mixed batch: the model, every value of it, its rows, and the values of each prompt run alone."""
    model = vlscope_model(request.param)
    names = vlscope.sites.expand(model, [*STREAM, *HEADS, *FEATURES, *TOWER])
    with model.trace(PROMPTS, images=IMAGES) as tracer:
        together = {name: vlscope.sites.read(tracer, name).save() for name in names}
    alone = []
    for prompt, images in zip(PROMPTS, IMAGES):
        with model.trace(prompt, images=images or None) as tracer:
            reached = model.scan(prompt, images=images or None)
            alone.append({name: vlscope.sites.read(tracer, name).save() for name in names if name in reached})
    return model, together, model.prompt_rows(PROMPTS, images=IMAGES), alone


def close(ours, theirs):
    assert difference(ours, theirs, 1e-5) is None, difference(ours, theirs, 1e-5)


def test_the_text_values_of_each_row_equal_its_single_run(batch):
    model, together, rows, alone = batch
    for row, single in zip(rows, alone, strict=True):
        for name in vlscope.sites.expand(model, STREAM):
            close(together[name][row.index, row.tokens], single[name][0])
        for name in vlscope.sites.expand(model, HEADS):
            close(together[name][row.index, :, row.tokens], single[name][0])


def test_the_features_and_patches_of_each_row_equal_its_single_run(batch):
    model, together, rows, alone = batch
    for row, single in zip(rows, alone, strict=True):
        if not row.images:
            assert row.features.start == row.features.stop and row.patches.start == row.patches.stop
            assert "vision.image_features" not in single
            continue
        for name in vlscope.sites.expand(model, FEATURES):
            close(together[name][row.features], single[name])
        for name in vlscope.sites.expand(model, TOWER):
            close(together[name][:, row.patches], single[name])


def test_the_features_of_each_image_are_found_in_the_batch(batch):
    model, together, rows, _ = batch
    images = [image for row in rows for image in row.images]
    assert [(image.prompt, image.image) for image in images] == [(1, 0), (2, 1), (2, 2)]
    for image, given in zip(images, [one for own in IMAGES for one in own]):
        with model.trace("What is this?", images=[given]):
            features = model.vision.image_features.save()
        close(together["vision.image_features"][image.rows], features)
        embedded = together["layers.0.layer_input"][image.prompt, image.positions]
        assert torch.equal(embedded, together["vision.image_features"][image.rows])


def test_rows_divide_the_batch(batch):
    model, together, rows, _ = batch
    length = together["logits"].shape[1]
    assert [row.index for row in rows] == [0, 1, 2] and {row.tokens.stop for row in rows} == {length}
    with model.trace(PROMPTS, images=IMAGES):
        mask = model.attention_mask.save()
    assert [length - row.tokens.start for row in rows] == mask.sum(1).tolist()
    for part, name in (("features", "vision.image_features"), ("patches", "vision.patch_embeddings")):
        slices = [getattr(row, part) for row in rows]
        size = together[name].shape[0 if part == "features" else 1]
        assert [slices[0].start, *(s.stop for s in slices)] == [*(s.start for s in slices), size]


def test_an_edit_of_one_row_of_a_mixed_batch_stays_there(batch):
    model, together, rows, _ = batch
    with model.trace(PROMPTS, images=IMAGES):
        model.vision.image_features[rows[2].images[1].rows] = 0
        logits = model.logits.save()
    assert torch.equal(logits[:2], together["logits"][:2]) and not torch.equal(logits[2], together["logits"][2])


def test_an_encoding_and_its_arguments_trace_as_the_prompts_do(model):
    encoding = model.encode(PROMPTS, images=IMAGES)
    expected = model(PROMPTS, images=IMAGES).logits
    assert torch.equal(model(encoding).logits, expected) and torch.equal(model(**encoding).logits, expected)
    assert model.encode(encoding).keys() == encoding.keys()
    with pytest.raises(vlscope.InputError, match="images"):
        model.encode(encoding, images=IMAGES)
    with pytest.raises(vlscope.InputError, match="without a prompt"):
        model.encode(images=IMAGES)
    with pytest.raises(vlscope.InputError, match="no prompt"):
        model.encode()
    with pytest.raises(TypeError, match="output_attentions"):
        model.encode("Hello", output_attentions=True)


def test_ids_without_a_mask_have_no_padding(model):
    row = only(model.prompt_rows(input_ids=[[tiny.PAD, 5, 6]]))
    assert row.tokens == slice(0, 3) and row.images == ()
    row = only(model.prompt_rows(input_ids=[[tiny.PAD, 5, 6]], attention_mask=[[0, 1, 1]]))
    assert row.tokens == slice(1, 3)


def test_grids_and_placeholders_that_do_not_match_are_refused(model):
    encoding = model.encode(QUESTION, images=[grey((96, 64))])
    short = {
        **encoding,
        "input_ids": encoding["input_ids"][:, :6],
        "attention_mask": encoding["attention_mask"][:, :6],
    }
    with pytest.raises(vlscope.InputError, match="2 image tokens.* 1 images give 6"):
        model.image_tokens(short)
    with pytest.raises(vlscope.InputError, match="mask"):
        model.prompt_rows(input_ids=[[5, 6]], attention_mask=[[0, 0]])


# --- images and videos in one batch -----------------------------------------------------------------------------


def values_of(model, encoding, patterns):
    """The values of sites in one trace of a whole batch."""
    with model.trace(**encoding) as tracer:
        return {name: vlscope.sites.read(tracer, name).save() for name in vlscope.sites.expand(model, patterns)}


@pytest.fixture(scope="module", params=["dense", "one_kv_head"])
def moving(request, vlscope_model, inputs):
    """A padded batch of images and videos: the model, the tensors, its rows, and its values."""
    model, encoding = vlscope_model(request.param), inputs(request.param, "images_and_videos")
    names = [*STREAM, *FEATURES, *TOWER, "vision.video_features", "vision.deepstack_merger_list.0.output"]
    return model, encoding, model.prompt_rows(**encoding), values_of(model, encoding, names)


def single(encoding, row):
    """The tensors of one prompt of the batch."""
    first = len(encoding["pixel_values"])
    own = {"input_ids": encoding["input_ids"][row.index : row.index + 1, row.tokens]}
    for name, items in (("image", row.images), ("video", row.videos)):
        if items:
            pixels = "pixel_values" if name == "image" else "pixel_values_videos"
            start = 0 if name == "image" else first
            parts = [encoding[pixels][item.patches.start - start : item.patches.stop - start] for item in items]
            own |= {pixels: torch.cat(parts), f"{name}_grid_thw": torch.tensor([item.grid for item in items])}
    return own


def test_images_and_videos_are_found_among_tokens_features_and_patches(moving):
    model, encoding, rows, values = moving
    items = [item for row in rows for item in (*row.images, *row.videos)]
    assert {item.kind for item in items} == {"image", "video"} and max(item.grid[0] for item in items) == 3
    taps = values["vision.deepstack_merger_list.0.output"]
    for item in items:
        features = values[f"vision.{item.kind}_features"][item.rows]
        assert torch.equal(values["layers.0.layer_input"][item.prompt, item.positions], features)
        folded = taps[item.patches.start // 4 : item.patches.stop // 4]
        assert torch.equal(values["layers.0.deepstack_output"][item.deepstack], folded)
        first, last = (encoding["input_ids"][item.prompt, k] for k in (item.span.start, item.span.stop - 1))
        assert first == last == model.config[f"{item.kind}_token_id"]
    assert len(model.image_tokens(**encoding)) + len(model.video_tokens(**encoding)) == len(items)
    assert sorted(p for item in items for p in item.patch_map.flatten().tolist()) == list(range(len(taps) * 4))


def test_each_row_of_a_batch_with_videos_equals_its_single_run(moving):
    model, encoding, rows, values = moving
    for row in rows:
        own = single(encoding, row)
        reached = model.scan(**own)
        names = vlscope.sites.expand(model, [*STREAM, *FEATURES, *TOWER])
        alone = values_of(model, own, [name for name in names if name in reached])
        (inner,) = model.prompt_rows(**own)
        for name in vlscope.sites.expand(model, STREAM):
            close(values[name][row.index, row.tokens], alone[name][0])
        for name in alone.keys() & set(vlscope.sites.expand(model, "layers.*.deepstack_output")):
            close(values[name][row.deepstack], alone[name])
        for here, there in zip((*row.images, *row.videos), (*inner.images, *inner.videos), strict=True):
            for name in vlscope.sites.expand(model, TOWER):
                close(values[name][:, here.patches], alone[name][:, there.patches])
