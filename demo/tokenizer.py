"""The tokenizer, the chat template and the processor files of the built-in model.

They are laid out as in a Qwen3-VL repository on the hub, so that transformers' Auto classes load
the folder like any other.
"""

import json
import random
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

import world

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VOCABULARY = 768  # at most; the corpus is small and yields fewer

PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- set ns = namespace(images=0, videos=0) -%}"
    "{%- for m in messages -%}"
    "{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for c in m.content -%}"
    "{%- if c.type == 'image' or 'image' in c or 'image_url' in c -%}"
    "{%- set ns.images = ns.images + 1 -%}"
    "{%- if add_vision_id -%}{{- 'Picture ' ~ ns.images ~ ': ' -}}{%- endif -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif c.type == 'video' or 'video' in c -%}"
    "{%- set ns.videos = ns.videos + 1 -%}"
    "{%- if add_vision_id -%}{{- 'Video ' ~ ns.videos ~ ': ' -}}{%- endif -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in c -%}{{- c.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def single_token_words() -> list[str]:
    """Every answer, and the words of the indirect-object task: each must be one token."""
    answers = [
        *world.COLOR_NAMES,
        *world.SHAPES,
        *world.COUNTS,
        *world.PLACES,
        *world.CAPITALS.values(),
    ]
    words = [form for word in answers for form in (word, " " + word)]
    words += [" " + word for word in [*world.CAPITALS, *world.DAYS, *world.NAMES]]
    return words + [" " + word.lower() for word in [*world.COLOR_NAMES, *world.SHAPES]]


def corpus(samples: int = 6000) -> list[str]:
    """The text that the tokenizer is trained on; always the same."""
    rng = random.Random(0)
    lines = []
    for _ in range(samples):
        is_text = rng.random() < 0.4
        sample = world.text_sample(rng, "any") if is_text else world.image_sample(rng, "any")
        if sample.plain:
            lines.append(sample.question + sample.answer + ".")
        else:
            question = sample.question + world.ONE_WORD
            lines.append("user\n" + question + "\nassistant\n" + sample.answer)
        if sample.caption:
            lines.append("user\nDescribe this image.\nassistant\n" + sample.caption)
    return lines + single_token_words() * 40 + ["system\nYou are a helpful assistant."] * 20


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with the splitting rules of the Qwen family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    for word in single_token_words():
        if len(tokenizer.encode(word).ids) != 1:
            raise RuntimeError(f"{word!r} is not one token: enlarge the corpus or the vocabulary")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, vocab.json, merges.txt, tokenizer_config.json and the template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    special = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(tokenizer.token_to_id(text)): {"content": text, **special} for text in SPECIALS},
        "additional_special_tokens": SPECIALS[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 1024,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_processor(folder: Path) -> None:
    """Writes the image and the video preprocessor's configs; images of 4 to 16 image tokens."""
    shared = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
    }
    image = {
        "size": {"shortest_edge": 4096, "longest_edge": 16384},
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    video = {
        "size": {"shortest_edge": 4096, "longest_edge": 131072},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 16,
        "do_sample_frames": True,
        "return_metadata": False,
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    write_json(folder / "preprocessor_config.json", shared | image)
    write_json(folder / "video_preprocessor_config.json", shared | video)


def write_generation_config(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes generation_config.json; after `save_pretrained`, which writes one of its own."""
    pad, stop = (tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>"))
    config = {
        "bos_token_id": pad,
        "pad_token_id": pad,
        "eos_token_id": [stop, pad],
        "do_sample": False,
    }
    write_json(folder / "generation_config.json", config)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
