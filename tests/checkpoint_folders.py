"""Checkpoint folders changed on purpose: other shards, other names, other spellings of the config."""

import json

from safetensors.torch import save_file


def store(folder, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def shard(folder, tensors, parts=3):
    """Writes `tensors` as `parts` files with an index."""
    (folder / "model.safetensors").unlink()
    files = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    where = {name: files[i % parts] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    total = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    )
    return files, where


def configure(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def old(name):
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def to_v4(config, key="rope_type"):
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"mrope_section": rope["mrope_section"], "mrope_interleaved": True, key: "default"}
    config["torch_dtype"] = config.pop("dtype")
    config["vision_config"].pop("rope_parameters", None)
    config["vision_config"]["model_type"] = "qwen3_vl"
