# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE with the vocabulary and merges of a GGUF file.

Covers the pre-tokenizers that the captured models name, `smollm`, `gpt2` and
`qwen2`. The patterns use Python's own character classes, which agree with the
Unicode categories of the reference for letters and decimal digits; exotic
numerals (superscripts, Roman numeral signs) may split differently. Special
tokens are not recognised in text: prose has none.
"""

from __future__ import annotations

import re

_LETTER = r"[^\W\d_]"
_OTHER = r"(?:[^\w\s]|_)"

# Each entry: split out single digits first, and the pattern for the rest.
_PRE: dict[str, tuple[bool, str]] = {
    "smollm": (
        True,
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?\d+| ?{_OTHER}+|\s+(?!\S)|\s+",
    ),
    "gpt2": (
        False,
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?\d+| ?{_OTHER}+|\s+(?!\S)|\s+",
    ),
    "qwen2": (
        False,
        rf"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
        rf"|(?:[^\w\r\n]|_)?{_LETTER}+|\d| ?{_OTHER}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in the vocabulary.

    Printable Latin-1 bytes stand for themselves; the others get the code
    points from 256 on, in the order of their values.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(b if b in plain else next(spare)) for b in range(256)]


class Tokenizer:
    """Turns text into token ids and back."""

    def __init__(self, pre: str, tokens: list[str], merges: list[str]) -> None:
        digits, pattern = _PRE[pre]
        self._split_digits = digits
        self._pattern = re.compile(pattern)
        self._tokens = tokens
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._rank = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        self._alphabet = byte_alphabet()
        self._bytes = {c: b for b, c in enumerate(self._alphabet)}

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without any added start token."""
        pieces = re.split(r"(\d)", text) if self._split_digits else [text]
        ids: list[int] = []
        for piece in pieces:
            for word in self._pattern.findall(piece):
                ids.extend(self._ids[symbol] for symbol in self._merge(word))
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; broken UTF-8 shows as replacement characters."""
        chars = "".join(self._tokens[i] for i in ids)
        raw = b"".join(
            bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in chars
        )
        return raw.decode("utf-8", errors="replace")

    def _merge(self, word: str) -> list[str]:
        symbols = [self._alphabet[b] for b in word.encode("utf-8")]
        while len(symbols) > 1:
            pairs = list(zip(symbols, symbols[1:]))
            best = min(pairs, key=lambda p: self._rank.get(p, len(self._rank)))
            if best not in self._rank:
                break
            symbols = _join(symbols, best)
        return symbols


def _join(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """Replaces every occurrence of `pair`, left to right."""
    out: list[str] = []
    i = 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out
