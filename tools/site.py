"""What the site does to docstrings: a passage of `>>>` lines becomes a block of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """A docstring with its examples fenced for Markdown. An example ends at an empty line."""

    def fence(example: re.Match[str]) -> str:
        return f"{example[1]}```pycon\n{example[0]}\n{example[1]}```"

    return _EXAMPLE.sub(fence, docstring)


class Examples(griffe.Extension):
    """The extension that mkdocs.yml names."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
