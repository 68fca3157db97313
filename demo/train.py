#!/usr/bin/env python3
"""Trains the built-in model: a Qwen3-VL of 0.7 million parameters, in 15 minutes of one core.

    python demo/train.py --out DIR                # train, save, and print every table
    python demo/train.py --out DIR --eval-only    # print the tables of a folder trained before

Everything is made here from seeded random data, the tokenizer included; nothing is downloaded. The
model learns colours, shapes, places and counts of drawn shapes, a few facts, and the
indirect-object task. Training drops one of the two image pathways at a time (the image features,
or the DeepStack features), and rarely both: so either one carries the answer alone, and without
any the model answers the commonest colour, White.

The folder is laid out as on the hub and loads with transformers' Auto classes and with vlscope.
"""

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import evaluate
import tokenizer as files
import world
from batches import Batch, answer_logits, collate, encode

BATCH = 40
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARMUP = 80  # steps
EASY_SHARE = 0.3  # of the steps, at the beginning: at most one shape per image
COOLDOWN_SHARE = 0.5  # of the steps, at the end: the rate falls linearly
HIDDEN, LAYERS, VISION_HIDDEN, VISION_DEPTH = 64, 6, 48, 4


# --------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------


def build_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """The architecture of the dense Qwen3-VL checkpoints, made small."""
    token = tokenizer.token_to_id
    text = dict(
        vocab_size=math.ceil(tokenizer.get_vocab_size() / 16) * 16,  # padded, as the family pads
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        initializer_range=0.02,
        attention_bias=False,
        attention_dropout=0.0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        bos_token_id=token("<|endoftext|>"),
        eos_token_id=token("<|im_end|>"),
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    vision = dict(
        depth=VISION_DEPTH,
        hidden_size=VISION_HIDDEN,
        intermediate_size=2 * VISION_HIDDEN,
        num_heads=VISION_HIDDEN // 16,
        in_channels=3,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=HIDDEN,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1, 2],
        hidden_act="gelu_pytorch_tanh",
        initializer_range=0.02,
    )
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


@torch.no_grad()
def init_weights(model: Qwen3VLForConditionalGeneration) -> None:
    """Starts every matrix at a scale that fits its inputs.

    The usual standard deviation of 0.02 is far too small at these widths, and lets the sum over the
    1536 values of a patch drown the learned position table.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            std = 0.8 / math.sqrt(module.in_features)
            if name.endswith(("o_proj", "down_proj")):
                std /= math.sqrt(2 * LAYERS)
            elif "visual.blocks" in name and name.endswith(("attn.proj", "mlp.linear_fc2")):
                std /= math.sqrt(2 * VISION_DEPTH)
            module.weight.normal_(0, std)
    vision = model.model.visual
    projection = vision.patch_embed.proj
    projection.weight.normal_(0, 1 / math.sqrt(projection.weight[0].numel()))
    projection.bias.zero_()
    vision.pos_embed.weight.normal_(0, 0.8)
    model.model.language_model.embed_tokens.weight.normal_(0, 0.1)


def build_model(tokenizer: Tokenizer) -> Qwen3VLForConditionalGeneration:
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer))
    init_weights(model)
    return model


class PathDropout:
    """A hook on the vision model that zeroes whole pathways, drawn per image.

    Before each forward set `tokens_per_image` (None: change nothing) and `rates`, the probabilities
    of dropping the image features alone, the DeepStack features alone, and both.
    """

    def __init__(self, vision: torch.nn.Module, rng: random.Random):
        self.rng = rng
        self.tokens_per_image: list[int] | None = None
        self.rates = (0.0, 0.0, 0.0)
        self.handle = vision.register_forward_hook(self)

    def __call__(self, module, args, output):
        if self.tokens_per_image is None:
            return output
        draws = [self._draw() for _ in self.tokens_per_image]
        features, deepstack = (
            torch.tensor(keep).repeat_interleave(torch.tensor(self.tokens_per_image))[:, None] for keep in zip(*draws)
        )
        output.pooler_output = output.pooler_output * features
        output.deepstack_features = [tap * deepstack for tap in output.deepstack_features]
        return output

    def _draw(self) -> tuple[float, float]:
        """What one image keeps: 1 or 0 for its image features and for its DeepStack features."""
        features, deepstack, both = self.rates
        draw = self.rng.random()
        if draw < both:
            return 0.0, 0.0
        if draw < both + features:
            return 0.0, 1.0
        return 1.0, 0.0 if draw < both + features + deepstack else 1.0


def use_linear_patch_embedding(patch_embed: torch.nn.Module) -> None:
    """Computes the patch convolution as the matrix product that it is: its stride is its kernel."""
    weight, bias = patch_embed.proj.weight, patch_embed.proj.bias
    patch_embed.forward = lambda patches: F.linear(patches, weight.flatten(1), bias)


# --------------------------------------------------------------------------------------------------
# Optimisation
# --------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz iterations.

    Matrices of equal shape are updated in one batch; a convolution counts as the matrix
    [out, everything else]. Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.groups: dict[tuple[int, int], list[torch.Tensor]] = {}
        for p in self.param_groups[0]["params"]:
            self.groups.setdefault((p.shape[0], p[0].numel()), []).append(p)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self) -> None:
        options = self.param_groups[0]
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad.reshape(shape) for p in group])
            momentum = self.momenta[shape].lerp_(gradient, 1 - options["momentum"])
            update = orthogonalize(gradient.lerp(momentum, options["momentum"]))
            rate = options["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, u in zip(group, update):
                p.mul_(1 - options["lr"] * options["weight_decay"])
                p.add_(u.reshape(p.shape), alpha=-rate)


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Brings the singular values of every matrix of a batch [n, rows, columns] close to one."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def build_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, the patch embedding among them; AdamW for all the rest."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        is_matrix = p.ndim == 5 or (p.ndim == 2 and "embed" not in name)
        (matrices if is_matrix else others).append(p)
    return [
        Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, steps: int) -> float:
    """The share of the full rate: a linear start, flat, linearly down to 2 percent."""
    falling = 0.02 + 0.98 * (steps - step) / (COOLDOWN_SHARE * steps)
    return min(1.0, (step + 1) / WARMUP, falling)


def batch_stream(tokenizer: Tokenizer, rng: random.Random, steps: int) -> Iterator[tuple[bool, Batch]]:
    """Yields `steps` batches, each with whether it belongs to the easy phase.

    Two batches are drawn at a time and parted by length, which saves padding.
    """
    waiting: list[Batch] = []
    for step in range(steps):
        easy = step < EASY_SHARE * steps
        if not waiting:
            turns, mix = (2, world.EASY_MIX) if easy else (3, world.FULL_MIX)
            samples = [world.any_sample(rng, turns=turns, mix=mix) for _ in range(2 * BATCH)]
            encoded = [encode(tokenizer, sample) for sample in samples]
            encoded.sort(key=lambda item: len(item.ids))
            waiting = [encoded[:BATCH], encoded[BATCH:]]
            rng.shuffle(waiting)
        yield easy, collate(tokenizer, waiting.pop())


def train(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: Tokenizer,
    steps: int,
    seed: int,
    log_every: int,
) -> None:
    """Trains in place, and logs the mean loss of every `log_every` steps."""
    vision = model.model.visual
    use_linear_patch_embedding(vision.patch_embed)
    dropout = PathDropout(vision, random.Random(seed + 2))
    optimizers = build_optimizers(model)
    batches = batch_stream(tokenizer, random.Random(seed + 1), steps)
    model.train()
    losses = []
    progress = tqdm(batches, total=steps, unit="step", dynamic_ncols=True)
    for step, (easy, batch) in enumerate(progress):
        set_rates(optimizers, rate_factor(step, steps))
        dropout.tokens_per_image = batch.tokens_per_image
        dropout.rates = (0.10, 0.10, 0.03) if easy else (0.22, 0.22, 0.06)
        losses.append(train_step(model, optimizers, batch))
        if (step + 1) % log_every == 0:
            tqdm.write(f"step {step + 1:5d}  loss {sum(losses) / len(losses):.4f}")
            losses.clear()
    dropout.handle.remove()
    del vision.patch_embed.forward  # back to the convolution of the class
    model.eval()


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer, rate in zip(optimizers, (MUON_RATE, ADAM_RATE)):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor


def train_step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    """One update; returns the loss before it."""
    loss = F.cross_entropy(answer_logits(model, batch), batch.targets)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def save(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes everything that a checkpoint folder on the hub has."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    files.write_tokenizer(tokenizer, folder)
    files.write_processor(folder)
    files.write_generation_config(tokenizer, folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the built-in model of vlscope.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder")
    parser.add_argument("--steps", type=int, default=3000, help="updates of 40 samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100, metavar="STEPS")
    evaluation = parser.add_mutually_exclusive_group()
    evaluation.add_argument("--eval-only", action="store_true", help="print the tables of --out")
    evaluation.add_argument("--no-eval", action="store_true", help="train and save, no tables")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the same sums, and so the same model, on every machine like this one
    torch.manual_seed(arguments.seed)
    if not arguments.eval_only:
        tokenizer = files.build_tokenizer()
        model = build_model(tokenizer)
        print(f"{model.num_parameters()} parameters, {tokenizer.get_vocab_size()} tokens")
        train(model, tokenizer, arguments.steps, arguments.seed, arguments.log_every)
        save(model, tokenizer, arguments.out)
        print(f"saved {arguments.out}")
    if not arguments.no_eval:
        evaluate.print_tables(arguments.out)


if __name__ == "__main__":
    main()
