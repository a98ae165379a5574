"""Text to token ids and back, from the vocabulary inside a GGUF file (level 3).

Byte-level BPE run by the `tokenizers` library; ids equal those of llama.cpp (src/llama-vocab.cpp), which normalises nothing.
Only characters newer than Unicode 15 may split differently: there the library's tables decide. Knows nothing of chats or models.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cached_property

from .errors import GgufError, OptionError, UnsupportedModelError

_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# how words are cut before merging, by the name in tokenizer.ggml.pre
_WORDS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
}

# texts that make a token a control token whatever type the file gives it; the first one present fills the role
_ROLES = {
    "eot": ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
            "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
    "eom": ("<|eom_id|>",),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
                "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
                "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
                "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ROLES_THAT_END = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_TEXTS_THAT_END = (*_ROLES["eot"], "<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>",
                   "<turn|>", "<|tool_response>", "[e~[")


class TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each of the 256 bytes."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in own else chr(next(others)) for b in range(256)]


_CHARS = _byte_alphabet()
_BYTES = {char: bytes([b]) for b, char in enumerate(_CHARS)}
_SURROGATE = re.compile("[\ud800-\udfff]")


def _byte_of(token: int, text: str) -> bytes:
    if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        raise GgufError(f"token {token} is of type BYTE and its text is {text!r}, expected <0x00> to <0xFF>")
    return bytes([int(text[3:5], 16)])


class Tokenizer:
    """Encodes and decodes with one file's vocabulary; nothing big is read from the metadata before the first use.

    metadata: GGUF key to value; `tokenizer.ggml.model` must be "gpt2" and `tokenizer.ggml.pre` one of qwen2, qwen35.
    forced: cut words as qwen2 does when the file names another pre-tokenizer. Raises UnsupportedModelError.
    """

    def __init__(self, metadata: Mapping, *, forced: bool = False):
        self._metadata = metadata
        model = metadata.get("tokenizer.ggml.model", "none")
        if model != "gpt2":
            raise UnsupportedModelError(f"tokenizer.ggml.model is '{model}', expected 'gpt2' (byte-level BPE)")
        pre = metadata.get("tokenizer.ggml.pre", "default")
        if pre not in _WORDS and not forced:
            raise UnsupportedModelError(f"tokenizer.ggml.pre is '{pre}', built here: {', '.join(_WORDS)}; it can be forced, "
                                        f"words are then cut as for qwen2 and some ids will be wrong")
        self._words = _WORDS.get(pre, _WORDS["qwen2"])

    @classmethod
    def from_metadata(cls, metadata: Mapping, *, forced: bool = False) -> "Tokenizer":
        """Return the tokenizer of an open file; cheap. Raises UnsupportedModelError."""
        return cls(metadata, forced=forced)

    @cached_property
    def _texts(self) -> list[str]:
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if tokens is None:
            raise GgufError("key tokenizer.ggml.tokens is missing: the file has no vocabulary")
        return [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]

    @cached_property
    def _ids(self) -> dict[str, int]:
        ids = {text: i for i, text in enumerate(self._texts)}
        if len(ids) != len(self._texts):
            i = next(i for i, text in enumerate(self._texts) if ids[text] != i)
            raise GgufError(f"tokens {i} and {ids[self._texts[i]]} have the same text {self._texts[i]!r}")
        return ids

    @cached_property
    def _types(self) -> list[int]:
        types = [int(t) for t in self._metadata.get("tokenizer.ggml.token_type", ())] or [TokenType.NORMAL] * self.n_vocab
        if len(types) < self.n_vocab:
            raise GgufError(f"tokenizer.ggml.token_type has {len(types)} entries, expected {self.n_vocab}, one for each token")
        for token in {*self._roles.values(), *self._tokens_that_end}:
            types[token] = TokenType.CONTROL
        return types

    @cached_property
    def _roles(self) -> dict[str, int]:
        """Role to id, for roles the file gives no id and its vocabulary can fill."""
        found = {role: next((self._ids[t] for t in texts if t in self._ids), None) for role, texts in _ROLES.items()}
        return {role: i for role, i in found.items() if i is not None and self._special_id(role) is None}

    @cached_property
    def _tokens_that_end(self) -> set[int]:
        return {self._ids[text] for text in _TEXTS_THAT_END if text in self._ids}

    def _special_id(self, role: str) -> int | None:
        for name in (role, _OLD_KEYS.get(role, role)):
            key = f"tokenizer.ggml.{name}_token_id"
            token = self._metadata.get(key)
            if token is None:
                continue
            if not 0 <= int(token) < self.n_vocab:
                raise GgufError(f"{key} is {token}, the vocabulary has {self.n_vocab} tokens")
            return int(token)
        return None

    @property
    def n_vocab(self) -> int:
        return len(self._texts)

    @cached_property
    def bos(self) -> int | None:
        return self._special_id("bos")

    @cached_property
    def eos(self) -> int | None:
        return self._special_id("eos")

    @cached_property
    def eot(self) -> int | None:
        """The token that ends a turn: the file's, else found by its text."""
        token = self._special_id("eot")
        return self._roles.get("eot") if token is None else token

    @cached_property
    def eog(self) -> frozenset[int]:
        """All ids that end a generation: the file's eos, eot and eom, and whatever has a known ending's text."""
        named = (self._special_id(role) for role in ("eos", *_ROLES_THAT_END))
        filled = (self._roles.get(role) for role in _ROLES_THAT_END)
        return frozenset(self._tokens_that_end.union(i for i in (*named, *filled) if i is not None))

    def is_eog(self, token: int) -> bool:
        return token in self.eog

    def token_text(self, token: int) -> str:
        """Return the token as the file spells it (bytes as printable characters). Raises OptionError."""
        if not 0 <= token < self.n_vocab:
            raise OptionError(f"token id {token} is outside the vocabulary of {self.n_vocab} tokens")
        return self._texts[token]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text; what the vocabulary has no byte for is left out, as in llama.cpp.

        add_special: begin with bos and end with eos where the file asks for it. parse_special: a control token's text
        becomes that token. User-defined tokens are always found; a lone surrogate counts as U+FFFD. Raises GgufError.
        """
        ids = [self._required("bos")] if add_special and self._metadata.get("tokenizer.ggml.add_bos_token", False) else []
        for piece in self._split_special(_SURROGATE.sub("\ufffd", text), parse_special):
            ids += (piece,) if isinstance(piece, int) else self._encode_words(piece)
        if add_special and self._metadata.get("tokenizer.ggml.add_eos_token", False):
            ids.append(self._required("eos"))
        return ids

    def _required(self, role: str) -> int:
        token = getattr(self, role)
        if token is None:
            raise GgufError(f"tokenizer.ggml.add_{role}_token is true but key tokenizer.ggml.{role}_token_id is missing")
        return token

    @cached_property
    def _specials(self) -> list[tuple[str, int]]:
        kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        found = [(text, i) for i, (text, kind) in enumerate(zip(self._texts, self._types)) if kind in kinds]
        return sorted(found, key=lambda item: -len(item[0].encode()))

    def _split_special(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut at special tokens, the longest token first over the whole text: not the leftmost match, as llama.cpp does."""
        pieces: list[str | int] = [text] if text else []
        for special, token in self._specials:
            if special not in text or (not parse_special and self._types[token] != TokenType.USER_DEFINED):
                continue
            cut = []
            for piece in pieces:
                first, *others = [piece] if isinstance(piece, int) else piece.split(special)
                cut += (first, *(part for other in others for part in (token, other)))
            pieces = [piece for piece in cut if piece != ""]
        return pieces

    @cached_property
    def _bpe(self):
        """The library's tokenizer, and what to write for the ids it has beyond ours.

        Merges may go through texts that are no tokens, and small vocabularies lack bytes: such texts get ids past the end
        while merging, and turn into their one-byte tokens afterwards.
        """
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as Library
        merges = self._metadata.get("tokenizer.ggml.merges")
        if merges is None:
            raise GgufError("key tokenizer.ggml.merges is missing: the file's vocabulary cannot encode text")
        pairs = dict.fromkeys((m[:i], m[i + 1:]) for m in merges if (i := m.find(" ", 1)) > 0)
        ids = dict(self._ids)
        for text in (*_CHARS, *(part for a, b in pairs for part in (a, b, a + b))):
            ids.setdefault(text, len(ids))
        beyond = {i: [self._ids[c] for c in text if c in self._ids and c.isascii()]
                  for text, i in ids.items() if i >= self.n_vocab}
        library = Library(models.BPE(vocab=ids, merges=list(pairs)))
        library.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(self._words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
        return library, beyond

    def _encode_words(self, text: str) -> list[int]:
        library, beyond = self._bpe
        ids = library.encode(text, add_special_tokens=False).ids
        return [j for i in ids for j in beyond.get(i, (i,))] if beyond else ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token stands for, control tokens as their text, unused ones as nothing. Raises OptionError."""
        text, kind = self.token_text(token), self._types[token]
        if kind == TokenType.NORMAL:
            return b"".join(_BYTES.get(char) or char.encode() for char in text)
        if kind == TokenType.BYTE:
            return _byte_of(token, text)
        return text.encode() if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN) else b""

    def _shown_bytes(self, token: int, special: bool) -> bytes:
        shown = special or not 0 <= token < self.n_vocab or self._types[token] not in (TokenType.CONTROL, TokenType.UNKNOWN)
        return self.token_bytes(token) if shown else b""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD. special: control tokens show. Raises OptionError."""
        return b"".join(self._shown_bytes(token, special) for token in ids).decode("utf-8", "replace")

    def stream(self, *, special: bool = False) -> "TextStream":
        """Return a decoder for tokens that arrive one by one."""
        return TextStream(self, special)


class TextStream:
    """Turns tokens into text as they come; a character shows once all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, special: bool):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text this token completes, which may be empty. Raises OptionError."""
        return self._decoder.decode(self._tokenizer._shown_bytes(token, self._special))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, else nothing; the stream can be used again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
