"""Prompts for collections of the built-in model, and their rows by plain traces."""

from __future__ import annotations

import json

import torch

from vlscope.demo import picture

COLORS = ("red", "blue", "green", "black", "yellow", "purple")
SIZES = ((96, 96), (64, 96), (128, 64))


def image_prompt(k):
    return {"prompt": "What color is this?", "images": [picture(COLORS[k % 6], size=SIZES[k % 3])]}


def mixed():
    """Text alone, one image, two images, a conversation: of many lengths."""
    two = {"prompt": "Are these the same?", "images": [picture("red", size=(64, 64)), picture("blue", size=(96, 64))]}
    chat = {"messages": [{"role": "user", "content": [{"type": "image", "image": picture("green")}]}]}
    return [image_prompt(0), "The capital of France is", two, image_prompt(1), chat, "Hello", image_prompt(2)]


def text_prompts(count):
    return [" ".join(["The capital of France is Paris."] * (1 + k % 5)) for k in range(count)]


def write_jsonl(folder, count):
    """`count` prompts with an image each; the paths are relative to the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "images").mkdir(exist_ok=True)
    lines = []
    for k in range(count):
        sample = image_prompt(k)
        sample["images"][0].save(folder / "images" / f"{k}.png")
        lines.append(json.dumps({**sample, "images": [f"images/{k}.png"]}))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def plain(model, samples, sites, dtype=None):
    """For each site the values of every sample traced by itself, one after the other."""
    found = {site: [] for site in sites}
    for sample in samples:
        given = dict(sample) if isinstance(sample, dict) else {"prompt": sample}
        if "messages" in given:
            given["prompt"] = given.pop("messages")
        for site in sites:
            with torch.no_grad(), model.trace(**given) as tracer:
                value = tracer.root.get(site).clone()
            found[site].append(value if dtype is None else value.to(dtype))
    return found


def stored(path, site=None):
    """All columns of a collection, sorted as one shard would have them."""
    import vlscope

    acts = vlscope.ActivationDataset(path, site)
    found = acts[:]
    order = torch.argsort(found["sample"], stable=True)
    return {name: column[order] for name, column in found.items()}
