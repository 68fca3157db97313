"""Text and pixels to model inputs: a light stand-in for transformers' `AutoProcessor`.

>>> processor = Processor.from_folder("Qwen3-VL-4B-Instruct")
>>> processor(text="<|vision_start|><|image_pad|><|vision_end|>What is this?", images=[picture],
...           return_tensors="pt").input_ids.shape
torch.Size([1, 202])
"""

from .images import ImageProcessor, ImageSettings
from .processor import Processor
from .text import ChatTemplate, Encoding, Tokenizer
from .videos import Qwen2VideoSettings, VideoProcessor, VideoSettings

__all__ = [
    "ChatTemplate",
    "Encoding",
    "ImageProcessor",
    "ImageSettings",
    "Processor",
    "Tokenizer",
    "VideoProcessor",
    "Qwen2VideoSettings",
    "VideoSettings",
]
