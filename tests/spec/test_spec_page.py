"""Each code block of the specification page, its lines unchanged, on the built-in model and on a tiny random one."""
# ruff: noqa: B018 - reading an attribute is the test

import pytest
import torch
from PIL import Image

CONTRIBUTIONS = """\
with model.trace(prompt):
    x = model.layers[1].input.save()
    attn = model.layers[1].self_attn.attention_output.save()
    mlp = model.layers[1].mlp.mlp_output.save()
    out = model.layers[1].layer_output.save()

torch.testing.assert_close(x + attn + mlp, out)
"""

DEEPSTACK_ADD = """\
with model.trace(prompt, images=[red]):
    mask = model.vision.image_token_mask.save()
    out = model.layers[0].layer_output.save()
    added = model.layers[0].deepstack_output.save()
    entering = model.layers[1].input.save()

torch.equal(entering[mask], out[mask] + added)   # True
torch.equal(entering[~mask], out[~mask])         # True
"""

ONE_ROW = """\
inputs = model.processor(text=prompt, images=[red, wide], return_tensors="pt")
sizes = inputs["image_grid_thw"].prod(-1).tolist()   # patches per image
with model.trace(prompt, images=[red, wide]):
    patches = model.vision.layers[1].layer_output.save()
per_image = patches[0].split(sizes)                  # one [t*h*w, vision_hidden_size] each
"""

PATTERNS = """\
attn = model.vision.layers[1].self_attn
with model.trace(prompt, images=[red, wide]):
    cu = attn.inputs[1]["cu_seqlens"].save()        # read first: the module's input
    q = attn.attention_queries.save()
    k = attn.attention_keys.save()

patterns = []
for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
    scores = q[0, :, a:b] @ k[0, :, a:b].transpose(-1, -2) * model.vision.head_dim ** -0.5
    patterns.append(scores.softmax(-1))             # [heads, patches_j, patches_j]
"""

MERGER = """\
with model.trace(prompt, images=[red, wide]):
    mask = model.vision.image_token_mask.save()
    fed = model.projector.input.save()          # [patches, vision_hidden_size]
    features = model.vision.image_features.save()
    first = model.layers[0].input.save()

fed.shape[0] // 4 == mask.sum()                 # True: one image token per 2 x 2 block
torch.equal(first[mask], features)              # True
"""

TAPS = """\
with model.trace(prompt, images=[red]):
    tapped = model.vision.deepstack_merger_list[0].output.save()
    added = model.layers[0].deepstack_output.save()

torch.equal(added, tapped)                       # True
"""

ABLATION = """\
with model.trace(prompt, images=[red]):
    model.vision.image_features[:] = 0
    for k in range(3):
        model.layers[k].deepstack_output[:] = 0
    ablated = model.logits.save()
"""

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
QUESTION = "What color is the square?"
RED = Image.new("RGB", (64, 64), "red")
WIDE = Image.new("RGB", (96, 32), "blue")


@pytest.fixture(params=["demo", "ungrouped"])
def name(request):
    return request.param


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


@pytest.fixture
def model(name, attention, vlscope_model):
    return vlscope_model(name, attention)


def execute(block, model, prompt):
    """Runs a block as it stands, then holds every line that the page marks `# True` to it."""
    names = {"model": model, "prompt": prompt, "red": RED, "wide": WIDE, "torch": torch}
    exec(block, names)
    for line in block.splitlines():
        statement, marked, _ = line.partition("# True")
        if marked:
            assert eval(statement, names), line
    return names


def prompts(images):
    """A question with one placeholder for each image, and the bare question, which becomes a turn of the chat."""
    return [PLACEHOLDER * images + QUESTION, QUESTION]


def test_the_contribution_identity_is_the_plain_sum(model):
    names = execute(CONTRIBUTIONS, model, QUESTION)
    assert torch.equal(names["x"] + names["attn"] + names["mlp"], names["out"])
    assert names["attn"].abs().max() > 0 and names["mlp"].abs().max() > 0


@pytest.mark.parametrize("prompt", prompts(1))
def test_the_text_model_adds_deepstack_between_blocks(model, prompt):
    names = execute(DEEPSTACK_ADD, model, prompt)
    assert names["mask"].any() and not names["mask"].all()
    assert names["added"].abs().max() > 0


def test_every_image_lies_in_one_row(model):
    names = execute(ONE_ROW, model, prompts(2)[0])
    widths = [tuple(part.shape) for part in names["per_image"]]
    assert widths == [(size, model.vision.vision_hidden_size) for size in names["sizes"]]
    assert len(widths) == 2 and widths[0] != widths[1]


def test_a_processor_encoding_is_the_same_prompt(model):
    names = execute(ONE_ROW, model, prompts(2)[0])
    with model.trace(**names["inputs"]):
        again = model.vision.layers[1].layer_output.save()
    assert torch.equal(again, names["patches"])


@pytest.mark.parametrize("prompt", prompts(2))
def test_a_pattern_of_each_image_reproduces_the_heads(model, attention, prompt):
    names = execute(PATTERNS, model, prompt)
    with model.trace(prompt, images=[RED, WIDE]):
        value = model.vision.layers[1].self_attn.attention_values.save()
        heads = model.vision.layers[1].self_attn.attention_head_outputs.save()
    bounds = names["cu"].tolist()
    assert len(bounds) == 3 and bounds[-1] == value.shape[2]
    for a, b, pattern in zip(bounds[:-1], bounds[1:], names["patterns"], strict=True):
        made = (pattern @ value[0, :, a:b]).transpose(0, 1)
        if attention == "eager":
            assert torch.equal(made, heads[0, a:b])
        else:
            torch.testing.assert_close(made, heads[0, a:b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompt", prompts(2))
def test_the_merger_folds_four_patches_into_one_token(model, prompt):
    names = execute(MERGER, model, prompt)
    assert names["features"].shape == (names["mask"].sum(), model.hidden_size)
    assert names["fed"].shape[1] == model.vision.vision_hidden_size


@pytest.mark.parametrize("prompt", prompts(1))
def test_the_first_tap_is_added_after_the_first_block(model, prompt):
    execute(TAPS, model, prompt)


@pytest.mark.parametrize("prompt", prompts(1))
def test_ablating_the_image_takes_features_and_all_three_taps(model, prompt):
    names = execute(ABLATION, model, prompt)
    with model.trace(prompt, images=[RED]):
        clean = model.logits.save()
    with model.trace(prompt, images=[WIDE.resize((64, 64))]):
        model.vision.image_features[:] = 0
        for k in range(3):
            model.layers[k].deepstack_output[:] = 0
        blind = model.logits.save()
    assert (names["ablated"] - clean).abs().max() > 1e-2
    assert torch.equal(names["ablated"], blind)  # nothing of the image is left
    with model.trace(prompt, images=[RED]):
        after = model.logits.save()
    assert torch.equal(after, clean)


def test_projector_reads_the_last_block_and_the_tower_returns_it_after_the_merger(model):
    with model.trace(QUESTION, images=[RED, WIDE]):
        last = model.vision.layers[-1].layer_output.save()
        fed = model.projector.input.save()
        merged = model.projector.output.save()
        tower = model.vision.tower_output.save()
        features = model.vision.image_features.save()
    assert torch.equal(fed, tower[0]) and torch.equal(tower, last)
    assert torch.equal(features, merged)


def test_the_sizes_are_the_configs(model):
    vision = model.vision
    assert vision.spatial_merge_size == 2 and vision.window_size is None
    assert vision.head_dim * vision.num_heads == vision.vision_hidden_size == vision.hidden_size
    with pytest.raises(Exception, match="grid|any|resolution|varies") as caught:
        vision.image_size
    assert type(caught.value).__name__ == "Unavailable"
