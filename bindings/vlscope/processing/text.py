"""Text: the tokenizer, the chat template, and the encoding that the processor returns."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, InputError

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as Backend

_PADDING_SIDES = ("left", "right")
_END_OF_TEXT = "<|endoftext|>"  # the family's eos, pad and unk where tokenizer_config.json is silent
# The pre-tokenizer of Qwen2's byte-level BPE, for folders that hold vocab.json and merges.txt alone;
# a tokenizer.json carries its own.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Encoding(dict[str, Any]):
    """What a processor returns: a dict whose entries are attributes too.

    `input_ids`, `attention_mask` and `mm_token_type_ids` (0 text, 1 image, 2 video) are
    [batch, tokens]; `pixel_values` is [patches, ...] and `image_grid_thw` [images, 3] where there
    are images, `pixel_values_videos` and `video_grid_thw` the same of videos.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the encoding has {', '.join(self)}, but no {name}") from None

    def to(self, device: torch.device | str) -> Encoding:
        """The same encoding with its tensors on `device`."""
        return Encoding(
            (name, value.to(device) if isinstance(value, torch.Tensor) else value) for name, value in self.items()
        )


class Tokenizer:
    """A light wrapper around a `tokenizers.Tokenizer`, called the way transformers' are.

    >>> tokenizer("The capital of France", return_tensors="pt").input_ids
    tensor([[ 785, 6722,  315, 9625]])
    """

    def __init__(self, read: Callable[[], Backend], config: Mapping[str, Any] | None = None) -> None:
        """`read` gives the backend and is called when it is first needed: a vocabulary of the real size takes
        longer than everything else that a load does. `config` is tokenizer_config.json."""
        config = config or {}
        self._read = read
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = self._named(config, "eos_token")
        self.pad_token = self._named(config, "pad_token")
        self.unk_token = self._named(config, "unk_token")
        self.padding_side = "left"

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Of tokenizer.json, else vocab.json and merges.txt; None where neither is there.

        The vocabulary is read when it is first needed. What is damaged raises `ConfigError`: a file that was cut
        short at once, any other damage then.
        """
        if (folder / "tokenizer.json").is_file():
            _check_whole(folder / "tokenizer.json")
        elif not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
            return None
        config = read_json(folder / "tokenizer_config.json") or {}
        return cls(functools.partial(_read_tokens, folder, config), config)

    @functools.cached_property
    def backend(self) -> Backend:
        """The `tokenizers.Tokenizer` underneath."""
        return self._read()

    def _named(self, config: Mapping[str, Any], name: str) -> str | None:
        """A special token by the config, which may say that there is none; by the vocabulary where it is silent."""
        if name in config:
            return _token_text(config[name])
        return None if self.backend.token_to_id(_END_OF_TEXT) is None else _END_OF_TEXT

    @property
    def bos_token_id(self) -> int | None:
        return self._id_or_none(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_or_none(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_or_none(self.pad_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id_or_none(self.unk_token)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens; a chat template sees them under these names."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return {name: token for name in names if (token := getattr(self, name)) is not None}

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary without the added tokens; `len(tokenizer)` counts those too."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Every token's text and id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens written out in it become themselves."""
        if not isinstance(text, str):
            raise InputError(f"text has to be a string, got {type(text).__name__}")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, in the vocabulary's spelling."""
        return self.backend.encode(text).tokens

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str]:
        """The text of a sequence of ids (or one id); a list of texts for a batch of sequences."""
        ids = _plain(ids)
        if isinstance(ids, int):
            ids = [ids]
        if ids and isinstance(ids[0], (list, tuple)):
            return self.batch_decode(ids, skip_special_tokens)
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, batch: Any, skip_special_tokens: bool = False) -> list[str]:
        """The text of each sequence of a batch."""
        rows = [list(_plain(row)) for row in _plain(batch)]
        return [self.backend.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each of several; None for what is not in the vocabulary."""
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or of each of several."""
        ids = _plain(ids)
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(index) for index in ids]

    def __call__(
        self,
        text: str | Sequence[str],
        padding: bool | str = False,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
    ) -> Encoding:
        """Ids and mask of one text or several, padded and made tensors when asked."""
        texts = [text] if isinstance(text, str) else text
        rows = [self.encode(item, add_special_tokens) for item in texts]
        encoding = self.pad(rows, padding, max_length, padding_side, return_tensors)
        if isinstance(text, str) and return_tensors is None:
            return Encoding((name, rows[0]) for name, rows in encoding.items())
        return encoding

    def pad(
        self,
        rows: Sequence[Sequence[int]],
        padding: bool | str = True,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = "pt",
    ) -> Encoding:
        """Ids and mask [batch, tokens] of rows of ids.

        `padding` is True or "longest", "max_length", or False or "do_not_pad"; the side is "left"
        unless told otherwise. Only "pt" and None are made; rows of different lengths cannot be a
        tensor without padding (`InputError`).
        """
        return pad_rows(
            rows,
            self.pad_token_id,
            length=_padded_length(rows, padding, max_length),
            side=padding_side or self.padding_side,
            return_tensors=return_tensors,
        )

    def _id_or_none(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, eos {self.eos_token!r}, pad {self.pad_token!r})"


def check_return_tensors(return_tensors: str | None) -> None:
    """Only torch tensors and plain lists are made here."""
    if return_tensors not in (None, "pt"):
        raise InputError(f"return_tensors has to be 'pt' or None, got {return_tensors!r}")


def pad_rows(
    rows: Sequence[Sequence[int]],
    pad_id: int | None,
    length: int | None,
    side: str = "left",
    return_tensors: str | None = "pt",
) -> Encoding:
    """`input_ids` and `attention_mask` of rows filled up to `length` (None: as they are)."""
    check_return_tensors(return_tensors)
    if side not in _PADDING_SIDES:
        raise InputError(f"padding_side has to be 'left' or 'right', got {side!r}")
    lengths = sorted({len(row) for row in rows})
    ids, masks = [], []
    for row in rows:
        pads: list[int] = []
        if length is not None and length > len(row):
            if pad_id is None:
                raise InputError(
                    f"prompts of {lengths[0]} and {length} tokens need padding, and the tokenizer names "
                    "no pad token; set `processor.tokenizer.pad_token`"
                )
            pads = [pad_id] * (length - len(row))
        mask = [0] * len(pads)
        left = side == "left"
        ids.append(pads + list(row) if left else list(row) + pads)
        masks.append(mask + [1] * len(row) if left else [1] * len(row) + mask)
    if return_tensors is None:
        return Encoding(input_ids=ids, attention_mask=masks)
    if len({len(row) for row in ids}) > 1:
        raise InputError(f"rows of {lengths[0]} to {lengths[-1]} tokens cannot be one tensor; pass padding=True")
    return Encoding(
        input_ids=torch.tensor(ids, dtype=torch.long),
        attention_mask=torch.tensor(masks, dtype=torch.long),
    )


def _padded_length(rows: Sequence[Sequence[int]], padding: bool | str, max_length: int | None) -> int | None:
    if padding in (False, "do_not_pad"):
        return None
    if padding in (True, "longest"):
        return max(map(len, rows), default=0)
    if padding == "max_length":
        if max_length is None:
            raise InputError("padding='max_length' needs max_length=")
        return max_length
    raise InputError(f"padding has to be True, False, 'longest' or 'max_length', got {padding!r}")


class ChatTemplate:
    """A chat template, rendered as transformers renders it."""

    def __init__(self, source: str) -> None:
        self.source = source

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template; None where it has none.

        Looked for in processor_config.json, chat_template.json, chat_template.jinja and
        tokenizer_config.json, in this order, which is transformers' own.
        """
        places = ("processor_config.json", "chat_template.json")
        source = next((text for name in places if (text := _template_in(folder / name))), None)
        if source is None and (path := folder / "chat_template.jinja").is_file():
            source = path.read_text(encoding="utf-8")
        source = source or _template_in(folder / "tokenizer_config.json")
        return None if source is None else cls(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a conversation; `variables` are the template's own (tools, ...)."""
        import jinja2

        try:
            return _compile(self.source).render(messages=messages, **variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise InputError(f"the chat template refused the conversation: {error}") from error

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads."""
        import jinja2.meta

        tree = _compile(self.source).environment.parse(self.source)
        return frozenset(jinja2.meta.find_undeclared_variables(tree))


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Accepts `{% generation %}` ... `{% endgeneration %}`, which marks the assistant's part."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file; damage raises `ConfigError`."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} has to hold a JSON object, got {type(value).__name__}")
    return value


def _template_in(path: Path) -> str | None:
    template = (read_json(path) or {}).get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: chat_template has to be a string, got {type(template).__name__}")
    return template


def _token_text(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    text: str | None = token["content"] if isinstance(token, Mapping) else token
    return text


def _plain(ids: Any) -> Any:
    """Ids as Python lists, whatever holds them."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


def _check_whole(path: Path) -> None:
    """Refuse a file that is no JSON object from its first byte to its last."""
    with path.open("rb") as file:
        first = file.read(64).lstrip()[:1]
        file.seek(max(0, path.stat().st_size - 64))
        last = file.read().rstrip()[-1:]
    if (first, last) != (b"{", b"}"):
        raise ConfigError(f"{path} is not a whole tokenizer file: it begins with {first!r} and ends with {last!r}")


def _read_tokens(folder: Path, config: Mapping[str, Any]) -> Backend:
    path = folder / "tokenizer.json"
    backend = _read_backend(path) if path.is_file() else _build_byte_level_bpe(folder)
    _add_missing_tokens(backend, config, folder)
    return backend


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{path} is not a tokenizer file: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    return backend


def _build_byte_level_bpe(folder: Path) -> Backend:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{vocab} and {merges} are not a BPE vocabulary: {error}") from None
    backend = Backend(model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens that the folder declares and the backend lacks, at the ids declared."""
    from tokenizers import AddedToken

    declared: dict[int, dict[str, Any]] = {
        index: {"content": text, "special": True}
        for text, index in (read_json(folder / "added_tokens.json") or {}).items()
    }
    declared |= {int(index): token for index, token in config.get("added_tokens_decoder", {}).items()}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [
            AddedToken(**{name: value for name, value in token.items() if name != "id"})
            for _, token in sorted(declared.items())
            if token["content"] not in known
        ]
    )
    for index, token in declared.items():
        if (found := backend.token_to_id(token["content"])) != index:
            raise ConfigError(
                f"{folder}: token {token['content']!r} is declared at id {index}, but the vocabulary has it at {found}"
            )
