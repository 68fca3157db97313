"""The tower: where patches stand, what they see, and the arithmetic that ports get wrong."""

import pytest
import torch
from torch.nn import functional

import tiny
import vlscope

VS, VE, IMAGE = tiny.VISION_START, tiny.VISION_END, tiny.IMAGE
GRIDS = [(4, 4), (6, 6), (2, 8), (8, 2)]


def images(*grids, seed=0):
    """A prompt of images of random pixels, `grids` in rows and columns of patches."""
    ids, rows = [], sum(h * w for h, w in grids)
    for height, width in grids:
        ids += [7, VS, *[IMAGE] * (height * width // 4), VE]
    pixels = torch.rand(rows, 1536, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    grid_thw = torch.tensor([(1, *grid) for grid in grids])
    return {"input_ids": torch.tensor([ids]), "pixel_values": pixels, "image_grid_thw": grid_thw}


def by_merge_block(raster):
    """Rows of a raster [height, width, ...] in the order of the patches: 2 x 2 blocks, each row by row."""
    height, width = raster.shape[:2]
    return raster.unflatten(1, (width // 2, 2)).unflatten(0, (height // 2, 2)).transpose(1, 2).flatten(0, 3)


@pytest.mark.parametrize("height, width", GRIDS)
def test_vi_01_the_position_table_is_sampled_from_corner_to_corner(checkpoint, height, width):
    model = vlscope.load(checkpoint("dense"))
    vision = model.vision
    table = (torch.arange(4)[:, None] * 10.0 + torch.arange(4))[..., None].expand(4, 4, 32)
    vision.pos_embed.weight[:] = table.flatten(0, 1)
    vision.patch_embed.proj.weight[:] = 0
    vision.patch_embed.proj.bias[:] = 0
    with model.trace(**images((height, width))):
        added = vision.layers[0].layer_input[0].clone()
    rows, columns = torch.linspace(0, 3, height), torch.linspace(0, 3, width)
    expected = by_merge_block((rows[:, None] * 10 + columns)[..., None].expand(-1, -1, 32))
    torch.testing.assert_close(added, expected, rtol=1e-5, atol=1e-5)
    corners = by_merge_block(torch.arange(height * width).view(height, width))
    for corner, place in zip((0, width - 1, -width, -1), (0, 3, 12, 15), strict=True):
        where = (corners == corner % (height * width)).nonzero().item()
        torch.testing.assert_close(added[where], table.flatten(0, 1)[place], rtol=0, atol=1e-5)
    if (height, width) == (4, 4):
        assert torch.equal(added, by_merge_block(table))


TOWER = [
    *(f"vision.layers.{k}.layer_output" for k in range(4)),
    "vision.image_features",
    "vision.deepstack_merger_list.0.output",
    "vision.deepstack_merger_list.1.output",
]


def tower(model, inputs):
    """The values of the tower, by site, rows first."""
    with model.trace(**inputs):
        read = {site: model.get(site) for site in sorted(TOWER, key=model.order)}
        return {site: (value[0] if value.ndim == 3 else value).clone() for site, value in read.items()}


def test_vi_03_no_image_sees_another(model):
    """To the bit beside an image of the same size; the last bits of a product depend on how many rows it has."""
    first, second = (4, 6), (6, 2)
    both = images(first, second)
    changed = {**both, "pixel_values": both["pixel_values"].clone()}
    changed["pixel_values"][-1, 0] += 0.5
    alone = {**images(first), "pixel_values": both["pixel_values"][:24]}
    together, beside, single = tower(model, both), tower(model, changed), tower(model, alone)
    for site, value in together.items():
        own = 24 if "layers" in site else 6
        assert torch.equal(value[:own], beside[site][:own]), site
        assert not torch.equal(value[own:], beside[site][own:]), site
        torch.testing.assert_close(value[:own], single[site], rtol=1e-5, atol=1e-5)


ORDER = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_vi_05_patches_stand_in_blocks_of_two_by_two(model):
    greys = torch.arange(16, dtype=torch.uint8) * 16
    picture = greys.view(4, 4).repeat_interleave(16, 0).repeat_interleave(16, 1)[..., None].expand(-1, -1, 3)
    batch = model.encode("What?", images=[picture])
    seen = (batch["pixel_values"].mean(1) * 127.5 + 127.5).round().to(torch.uint8)
    assert seen.tolist() == greys[ORDER].tolist()
    (tokens,) = model.image_tokens(**batch)
    assert tokens.patch_map.flatten().argsort().tolist() == ORDER


@pytest.mark.parametrize("height, width", [(4, 6), (6, 4)])
def test_vi_05_the_maps_between_raster_and_stream_undo_each_other(model, height, width):
    (tokens,) = model.image_tokens(**images((height, width)))
    rows = [tokens.patch_at(row, column) for row in range(height) for column in range(width)]
    assert sorted(rows) == list(range(height * width))
    places = [tokens.patch_place(patch)[1:] for patch in rows]
    assert places == [(row, column) for row in range(height) for column in range(width)]
    for patch in rows:
        _, row, column = tokens.patch_place(patch)
        assert tokens.place(tokens.token_of(patch))[1:] == (row // 2, column // 2)


@pytest.mark.parametrize("height, width", [(2, 8), (8, 2)])
def test_vi_07_the_first_half_of_a_head_turns_by_row_and_the_second_by_column(model, height, width):
    """By hand: 16 dimensions are 8 angles, 4 of the row and 4 of the column, at base 10,000."""
    attention = model.vision.layers[0].self_attn
    with model.trace(**images((height, width))):
        raw = attention.qkv.output.unflatten(-1, (3, 2, 16))[:, 0]
        queries = attention.attention_queries[0].transpose(0, 1)
    row = by_merge_block(torch.arange(height)[:, None].expand(-1, width)).float()
    column = by_merge_block(torch.arange(width).expand(height, -1)).float()

    def turned(first, second):
        frequencies = 10000.0 ** (-torch.arange(4) / 4)
        angles = torch.cat([first[:, None] * frequencies, second[:, None] * frequencies], 1).repeat(1, 2)[:, None]
        a, b = raw.chunk(2, -1)
        return raw * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    torch.testing.assert_close(queries, turned(row, column), rtol=1e-5, atol=1e-5)
    assert (queries - turned(column, row)).abs().max() > 0.1


def test_vi_08_blocks_use_the_gelu_of_tanh_and_mergers_the_exact_one(model):
    """Pre-activations are put within -3 .. 3, where the two differ by up to 5e-4."""
    mergers = ["vision.deepstack_merger_list.0", "vision.deepstack_merger_list.1", "projector"]
    paths = [*(f"vision.layers.{k}.mlp" for k in range(4)), *mergers]
    for path in paths:
        module = model.get(path)
        with model.trace(**images((4, 6))):
            before = model.get(path).linear_fc1.output
            before[:] = before / before.abs().max() * 3
            after = module.linear_fc2.input.clone()
            given = before.clone()
        exact, tanh = functional.gelu(given), functional.gelu(given, approximate="tanh")
        right, wrong = (exact, tanh) if path in mergers else (tanh, exact)
        assert torch.equal(after, right) and (after - wrong).abs().max() > 1e-4, path


@pytest.fixture
def overflowing(checkpoint):
    """overflowing(dtype): the model with one MLP of the tower scaled to some 1e6."""

    def load(dtype):
        model = vlscope.load(checkpoint("dense"), dtype=dtype)
        model.vision.layers[1].mlp.linear_fc2.weight.mul_(6e4)
        return model

    return load


def test_vi_10_an_overflow_shows_where_it_arises_and_ends_a_generation(overflowing):
    model, image = overflowing(torch.float16), images((4, 6))
    assert vlscope.first_nonfinite(model, **image) == "vision.layers.1.mlp.linear_fc2.output"
    with model.trace(**image):
        assert model.vision.layers[1].layer_input.isfinite().all()
        assert not model.vision.layers[1].layer_output.isfinite().all()
    with pytest.raises(vlscope.NonFiniteError, match=r"step 0 .*prompt 0.*nan.*first_nonfinite"):
        _ = model.generate(**image, max_new_tokens=3).result
    text = torch.tensor([[5, 6, 7]])
    assert model.generate(text, max_new_tokens=3, eos_token_id=[]).result.shape == (1, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vi_10_wider_types_hold_the_same_numbers(overflowing, dtype):
    model, image = overflowing(dtype), images((4, 6))
    assert vlscope.first_nonfinite(model, **image) is None
    assert model.generate(**image, max_new_tokens=2, eos_token_id=[]).result.shape[1] == image["input_ids"].shape[1] + 2
