"""The page of attention, as Chromium shows it."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import browser
import vlscope
from vlscope.demo import picture
from vlscope.html import Page

RED, TALL = picture("red", size=(128, 96)), picture("blue", "circle", size=(64, 128))
TWO = {"prompt": "Which is red?", "images": [RED, TALL]}
SHARE = 1 / 65535 + 1e-5  # how far a share on the page, 16 bits and five decimals, may be from the model's

#: Points at a token and chooses from the lists, as a reader would.
POINTING = """<script>
const choose = (id, value) => {
  const list = document.getElementById(id);
  list.value = value;
  list.dispatchEvent(new Event("change"));
};
const at = (token, kind) => document.querySelector(`[data-token="${token}"]`).dispatchEvent(new Event(kind));
%s
</script>"""


@pytest.fixture(scope="module")
def model(vlscope_model):
    return vlscope_model("demo")


@pytest.fixture(scope="module")
def page(model):
    return vlscope.html.attention(model, **TWO)


@pytest.fixture(scope="module")
def patterns(model):
    """[layers, heads, tokens, tokens]"""
    with model.trace(**TWO):
        return torch.stack([layer.self_attn.attention_probabilities[0] for layer in model.layers])


def shares(text):
    """What the page shows for each token: {token: share}."""
    found = {}
    for tag in re.findall(r"<(?:div|span) [^>]*data-token[^>]*>", text):
        found[int(re.search(r'data-token="(\d+)"', tag)[1])] = float(re.search(r'data-share="([\d.]+)"', tag)[1])
    return found


def summary(text):
    return re.search(r'id="summary">([^<]*)<', text)[1]


def hidden(model):
    """The image tokens, which stand on the page as cells, in order."""
    return [p for image in model.image_tokens(**TWO) for p in image.positions.tolist()]


def check(text, row):
    found = shares(text)
    assert sorted(found) == list(range(len(row)))
    for token, share in found.items():
        assert share == pytest.approx(row[token].item(), abs=SHARE)


def test_the_address_chooses_block_head_and_token(page, patterns, tmp_path):
    text = browser.document(page.save(tmp_path / "page.html"), "layer=3&head=1&token=30")
    check(text, patterns[3, 1, 30])
    assert summary(text).startswith('Token 30, " is": ')


def test_it_opens_on_the_last_token_and_the_mean_of_the_heads(model, page, patterns, tmp_path):
    text = browser.document(page.save(tmp_path / "page.html"))
    row = patterns[0, :, -1].mean(0)
    check(text, row)
    assert f"{100 * row[hidden(model)].sum():.1f}% of its attention" in summary(text)


def test_pointing_shows_a_token_leaving_goes_back_and_a_click_keeps_it(page, patterns, tmp_path):
    steps = {
        "at(31, 'mouseover')": patterns[4, 2, 31],
        "at(31, 'mouseover'); at(31, 'mouseout')": patterns[4, 2, -1],
        "at(9, 'click'); at(31, 'mouseover'); at(31, 'mouseout')": patterns[4, 2, 9],  # token 9 is of an image
    }
    for steps_, row in steps.items():
        script = POINTING % f"choose('layer', 4); choose('head', 2); {steps_};"
        changed = Page(page.text.replace("</html>", script + "</html>"))
        check(browser.document(changed.save(tmp_path / "page.html")), row)


def test_the_cells_of_an_image_are_its_tokens_in_raster_order(model, page, tmp_path):
    text = browser.document(page.save(tmp_path / "page.html"))
    grids = re.findall(r'class="cells" style="grid-template:([^"]*)"', text)
    for grid, image in zip(grids, model.image_tokens(**TWO), strict=True):
        _, rows, columns = image.shape
        assert re.findall(r"repeat\((\d+)", grid) == [str(rows), str(columns)]
    cells = [int(token) for token in re.findall(r'class="cell[^>]*data-token="(\d+)"', text)]
    assert cells == hidden(model)


def test_the_darkest_cell_on_the_screen_is_where_the_attention_is(model, page, patterns, tmp_path):
    places = POINTING % (
        "const boxes = [...document.querySelectorAll('.cell')].map((cell) => cell.getBoundingClientRect());"
        "document.body.dataset.boxes = JSON.stringify(boxes.map((box) => [box.x + 5, box.y + 5]));"
    )
    path = Page(page.text.replace("</html>", places + "</html>")).save(tmp_path / "page.html")
    address = "layer=3&head=1&token=37"
    text = browser.document(path, address)
    corners = json.loads(re.search(r'data-boxes="([^"]*)"', text)[1])
    browser.screenshot(path, tmp_path / "page.png", address)
    screen = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    colors = np.array([screen[round(y), round(x)] for x, y in corners])
    row = patterns[3, 1, 37, hidden(model)]
    darkest, faintest = colors[row.argmax()], colors[row.argmin()]
    assert colors.sum(1).argmin() == row.argmax()
    assert darkest[2] > darkest[0] > darkest[1] and faintest.min() > 200


def test_a_page_needs_nothing_from_elsewhere_and_holds_the_images_as_seen(page):
    assert not re.findall(r"https?://|src=|href=|@import", page.text.partition("<script")[0])
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.text, re.DOTALL)[1])
    for image, given in zip(data["images"], TWO["images"], strict=True):
        prefix, _, encoded = image["source"].partition(",")
        assert prefix == "data:image/png;base64"
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))), np.asarray(given))


def test_a_prompt_cannot_end_the_script_of_its_page(model, tmp_path):
    page = vlscope.html.attention(model, "</script><b>What & color?", images=[RED], layers=1, heads=0)
    text = browser.document(page.save(tmp_path / "page.html"))
    assert len(shares(text)) == len(model.encode("</script><b>What & color?", images=[RED])["input_ids"][0])
    assert "<b>" not in text.rpartition("<script")[0].partition("prompt")[2]


def test_chosen_blocks_and_heads_are_the_ones_in_the_lists(model, patterns, tmp_path):
    page = vlscope.html.attention(model, **TWO, layers=[1, -1], heads=[3])
    text = browser.document(page.save(tmp_path / "page.html"), "layer=5&head=3&token=36")
    check(text, patterns[5, 3, 36])
    assert re.findall(r"<option[^>]*>([^<]*)<", text) == ["1", "5", "mean of 1", "3"]


def test_a_notebook_shows_the_page_in_a_frame(page):
    shown = page._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<script" not in shown and "&lt;script" in shown


def test_too_many_weights_are_refused_with_the_way_out(model, monkeypatch):
    monkeypatch.setattr(vlscope.html, "_LARGEST", 2**15)
    with pytest.raises(vlscope.InputError, match="24 maps of 38 tokens.*layers= or heads="):
        vlscope.html.attention(model, **TWO)
    assert vlscope.html.attention(model, **TWO, layers=3)
    with pytest.raises(IndexError, match="head 4: there are 4"):
        vlscope.html.attention(model, **TWO, heads=4)
    with pytest.raises(vlscope.InputError, match="no image"):
        vlscope.html.attention(model, "Hello")
