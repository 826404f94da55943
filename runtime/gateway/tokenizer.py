"""Text to token ids and back, as the model's own tokenizer does it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from ..model.config import ModelConfig
from ..model.store import ModelFiles
from ..protocol.errors import BadInputError, ModelError
from .first_blank import forms_of
from .gguf_tokenizer import gguf_tokenizer
from .template import ChatTemplate
from .token_bytes import BYTE_CHARACTERS, bytes_of_tokens

_WORD_AND_BLANK = re.compile(rb"[A-Za-z0-9] ")


class Tokenizer:
    """A thin class over `tokenizers.Tokenizer`.

    Special tokens are found here and never by the library, so that whether a piece of text may hold
    any is decided piece by piece. Not changed after it is made: safe to share between threads.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        prefix: Sequence[int] = (),
        vocab_size: int | None = None,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.prefix_ids = tuple(prefix)
        """What the model's tokenizer puts before a text."""
        self.vocab_size = vocab_size or inner.get_vocab_size(with_added_tokens=True)
        """Ids the model knows; its embedding may be longer than the vocabulary."""
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        """What templates know by names such as ``bos_token``."""
        added = inner.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self._special_pattern = _special_pattern(added.values())
        self._forms = forms_of(inner)

    @classmethod
    def from_files(
        cls,
        files: ModelFiles,
        *,
        source: ModelFiles | None = None,
        chat_template: str | None = None,
    ) -> Tokenizer:
        """The tokenizer of a model; of ``source`` where that is another place (tokenizer_path).

        ``chat_template`` takes the place of the model's own. Raises `ModelError`.
        """
        config = ModelConfig.load(files)
        place = source or files
        inner, prefix = _load(place)
        settings = place.tokenizer_config()
        named = {
            key: text
            for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
            if (text := _token_text(settings.get(key))) is not None
        }
        for key, number in (("bos_token", config.bos_id), ("eos_token", _first(config.eos_ids))):
            token = None if number is None else inner.id_to_token(number)
            if token is not None:
                named.setdefault(key, token)
        eos = [
            *config.eos_ids,
            inner.token_to_id(named["eos_token"]) if "eos_token" in named else None,
        ]
        bos = inner.token_to_id(named["bos_token"]) if "bos_token" in named else None
        return cls(
            inner,
            prefix=prefix,
            vocab_size=config.vocab_size,
            eos_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            bos_id=config.bos_id if bos is None else bos,
            chat_template=chat_template or place.chat_template(),
            named_tokens=named,
        )

    # --- text to ids ------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True, start: bool = False) -> list[int]:
        """Ids of a text. ``special``: special tokens in it are parsed. ``start``: it begins the
        sequence, so what the tokenizer puts before a text comes first (never twice)."""
        return self.encode_segments([(text, special)], start=start)

    def encode_segments(
        self, segments: Iterable[tuple[str, bool]], start: bool = False, after: int | None = None
    ) -> list[int]:
        """Ids of the joined text of (text, may hold special tokens) pieces.

        Merges run across the pieces' borders as if the text had come in one; only special tokens
        end a run, and only those that lie within one piece that may hold them. ``after``: the last
        token of what the text goes on from; None: it is the beginning.
        """
        form = self._forms.first
        if after is not None:
            form = self._forms.after_special if after in self.special_ids else self._forms.inside
        ids = self._encode_pieces(segments, form)
        prefix = list(self.prefix_ids)
        if start and prefix and ids[: len(prefix)] != prefix:
            return prefix + ids
        return ids

    def _encode_pieces(
        self, segments: Iterable[tuple[str, bool]], form: tokenizers.Tokenizer
    ) -> list[int]:
        ids: list[int] = []
        run: list[str] = []
        for piece in self._cut(segments):
            if isinstance(piece, str):
                run.append(piece)
                continue
            ids += self._encode_run(run, form)
            ids.append(piece)
            run, form = [], self._forms.after_special
        return ids + self._encode_run(run, form)

    def encode_anywhere(self, segments: Sequence[tuple[str, bool]]) -> list[int] | None:
        """Ids that pieces have whatever token they come behind; ``None`` where that matters."""
        forms = self._forms
        plain = self._encode_pieces(segments, forms.inside)
        special = forms.after_special
        same = special is forms.inside or self._encode_pieces(segments, special) == plain
        return plain if same else None

    def _cut(self, segments: Iterable[tuple[str, bool]]) -> Iterable[str | int]:
        """Plain text and ids of special tokens, in order."""
        for text, special in segments:
            if not isinstance(text, str):
                raise BadInputError(f"a text is expected, not {type(text).__name__}")
            at = 0
            if special and self._special_pattern is not None:
                for match in self._special_pattern.finditer(text):
                    yield text[at : match.start()]
                    yield self._special[match[match.lastindex or 0]]
                    at = match.end()
            yield text[at:]

    def _encode_run(self, run: list[str], form: tokenizers.Tokenizer) -> list[int]:
        text = "".join(run)
        if not text:
            return []
        try:
            return form.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # what the library says to half a character
            raise BadInputError("the text holds half of a surrogate pair") from None

    def id(self, token: str) -> int | None:
        """The id of one token by its exact text; None for a text that is none."""
        return self.inner.token_to_id(token)

    # --- ids to text ------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids; broken UTF-8 becomes U+FFFD. Unknown ids raise `BadInputError`."""
        return b"".join(self._bytes_with(i, skip_special) for i in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; b"" for special tokens and unused ids."""
        self._check(token)
        return self.bytes_table[token]

    @cached_property
    def bytes_table(self) -> list[bytes]:
        """[vocab_size] bytes of every id."""
        return bytes_of_tokens(self.inner, self.vocab_size)

    @cached_property
    def words_are_apart(self) -> bool:
        """Whether no token holds the end of a word together with a blank behind it."""
        names = (name.encode() for name in self._special)
        return not any(_WORD_AND_BLANK.search(data) for data in (*self.bytes_table, *names))

    @cached_property
    def longest_token(self) -> int:
        """Bytes of text that one token stands for at most."""
        return max(
            max(map(len, self.bytes_table)), *(len(name.encode()) for name in self._special), 1
        )

    def _bytes_with(self, token: int, skip_special: bool) -> bytes:
        self._check(token)
        if not skip_special and token in self.special_ids:
            return (self.inner.id_to_token(token) or "").encode()
        return self.bytes_table[token]

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise BadInputError(
                f"token id {token} is outside the vocabulary of {self.vocab_size}", param="ids"
            )

    # --- messages ---------------------------------------------------------------------------------

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises `ProgramError` for a model that has none."""
        return ChatTemplate(self.chat_template, self.named_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The messages as the model wants to read them. The result is encoded without ``start``:
        templates write the first token themselves."""
        return self.template.render(messages, add_generation_prompt, **variables)


def _load(files: ModelFiles) -> tuple[tokenizers.Tokenizer, tuple[int, ...]]:
    path = files.tokenizer_json
    if path is not None:
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"cannot read {path}: {error}") from None
        return inner, _prefix_of(inner)
    if files.kind == "gguf":
        return gguf_tokenizer(files.gguf)
    if files.side_file("tokenizer.model") or files.side_file("vocab.json"):
        return _from_transformers(files)
    if files.kind == "config":
        return _byte_tokenizer(), ()
    raise ModelError(f"{files.path} has no tokenizer.json")


def _from_transformers(files: ModelFiles) -> tuple[tokenizers.Tokenizer, tuple[int, ...]]:
    """For older folders: slow to import, hence only here."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{files.path} has no tokenizer.json; converting its tokenizer needs transformers"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(str(files.folder))
        inner = loaded.backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ModelError(
            f"transformers cannot read the tokenizer of {files.path}: {error}"
        ) from None
    return inner, _prefix_of(inner)


def _byte_tokenizer() -> tokenizers.Tokenizer:
    """For a config without files: ids 0-255 are the bytes, so that made-up weights can be run."""
    vocabulary = {chr(point): byte for point, byte in BYTE_CHARACTERS.items()}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>"])
    return inner


def _prefix_of(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the post-processor puts in front, found by watching it work."""
    bare = inner.encode("a", add_special_tokens=False).ids
    full = inner.encode("a", add_special_tokens=True).ids
    for count in range(len(full) - len(bare) + 1):
        if full[count : count + len(bare)] == bare:
            return tuple(full[:count])
    return ()


def _special_pattern(added: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Finds special tokens, the longest first; one group a token, round what it eats beside it."""
    tokens = sorted((token for token in added if token.special), key=lambda t: -len(t.content))
    if not tokens:
        return None
    plain = "|".join(re.escape(t.content) for t in tokens if not _eats(t))
    parts = [f"({plain})"] if plain else []
    for token in filter(_eats, tokens):
        body = f"({re.escape(token.content)})"
        body = rf"(?<!\w){body}(?!\w)" if token.single_word else body
        parts.append(r"\s*" * token.lstrip + body + r"\s*" * token.rstrip)
    return re.compile("|".join(parts))


def _eats(token: tokenizers.AddedToken) -> bool:
    return bool(token.lstrip or token.rstrip or token.single_word)


def _token_text(value: Any) -> str | None:
    """A named token of tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _first(ids: Sequence[int]) -> int | None:
    return ids[0] if ids else None
