# SPDX-License-Identifier: Apache-2.0
"""Text for a model: tokenizers, documents, windows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

CAPTURE = Path(__file__).resolve().parent.parent / "data" / "capture"
sys.path.insert(0, str(CAPTURE))
import bpe  # noqa: E402

MARK = "<|endoftext|>"


class Tokenizer(bpe.Tokenizer):
    """With a memory for words, and the mark that stands before every document."""

    def __init__(self, pre: str, tokens: list[str], merges: list[str]) -> None:
        super().__init__(pre, tokens, merges)
        self._known: dict[str, list[str]] = {}
        self.mark = tokens.index(MARK)

    def _merge(self, word: str) -> list[str]:
        if word not in self._known:
            self._known[word] = super()._merge(word)
        return self._known[word]


def of_folder(path: Path) -> Tokenizer:
    """Of a tokenizer.json that splits as GPT-2's does."""
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Tokenizer("gpt2", tokens, merges)


def of_gguf(file) -> Tokenizer:
    """Of a model.GgufFile."""
    return Tokenizer(file.field("tokenizer.ggml.pre"), file.field("tokenizer.ggml.tokens"),
                     file.field("tokenizer.ggml.merges"))


def windows(text: str, groups: list[tuple[str, int]], tokenizer: Tokenizer,
            n_tokens: int, start: int = 0) -> list[tuple[str, np.ndarray]]:
    """(group, ids) of all windows. groups: names and how many documents each has; each document is
    preceded by the mark, a group's documents are joined and cut from token start on, what is left
    over is dropped."""
    documents = text.split(MARK)
    if sum(count for _, count in groups) != len(documents):
        groups = [("text", len(documents))]
    found = []
    for name, count in groups:
        ids: list[int] = []
        for document in documents[:count]:
            ids.append(tokenizer.mark)
            ids.extend(tokenizer.encode(document))
        documents = documents[count:]
        for at in range(start, len(ids) - n_tokens + 1, n_tokens):
            found.append((name, np.array(ids[at : at + n_tokens], np.int64)))
    return found


def spread(found: list, count: int) -> list:
    """count of them, evenly from the first to the last, so that each group has its share."""
    count = min(count, len(found))
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]
