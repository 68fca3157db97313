"""Count the patches and tokens of an image or a video.

The sizes that an image, or the frames of a video, have on the way to the language model, by
arithmetic alone: no model runs. An image is resized as the processor does it. The frames of a video
are taken as they were sampled and resized; the last is repeated to fill the last temporal patch.

Examples:
  vlscope shape --height 512 --width 512
  vlscope shape --height 512 --width 512 --frames 3 --model 2b
  vlscope shape --height 1080 --width 1920 --max-tokens 256 --model path/to/checkpoint
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--height", type=int, required=True, metavar="PIXELS")
    parser.add_argument("--width", type=int, required=True, metavar="PIXELS")
    parser.add_argument("--frames", type=int, metavar="N", help="a video of this many frames")
    parser.add_argument(
        "--model",
        default="8b",
        help='a size of Qwen3-VL such as "2b", "8b" (the default) or "235b-a22b", one of another family such as '
        '"qwen2.5-vl-7b", or a checkpoint folder',
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="bound an image to N visual tokens (max_pixels = N x 32 x 32)"
    )


def run(arguments: argparse.Namespace) -> None:
    from ..calculator import shapes

    print(
        shapes(
            arguments.height,
            arguments.width,
            frames=arguments.frames,
            model=arguments.model,
            budget=arguments.max_tokens,
        )
    )
