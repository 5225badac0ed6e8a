#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Takes a passage of a public-domain novel out of a Debian R data package.

    apt-get download r-cran-tokenizers
    dpkg-deb -x r-cran-tokenizers_*.deb unpacked
    extract_text.py unpacked/usr/lib/R/site-library/tokenizers/data/Rdata.rdb \
        --start 'CHAPTER 85. The Fountain.' --bytes 6000 --out moby_dick_ch85.txt

The .rdb file is a run of records: a 4-byte big-endian length, then a zlib
stream that inflates to that length and holds one R object in XDR form. Only
the strings are of interest, so the reader does not decode R objects: it looks
for string records (type byte 9, a length, the bytes) and keeps them in order.
R itself is not needed.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

STRING_TYPE = 9  # CHARSXP in the R serialization format
# Flag words of plain, ASCII, UTF-8 and Latin-1 strings: the type in the low
# byte, the encoding bits in the middle, the string-cache bit left as it may be.
ENCODING_BITS = {0x00, 0x04, 0x08, 0x40}


def records(blob: bytes) -> Iterator[bytes]:
    """Yields the inflated objects of an .rdb file."""
    at = 0
    while at < len(blob):
        (want,) = struct.unpack_from(">I", blob, at)
        stream = zlib.decompressobj()
        data = stream.decompress(blob[at + 4 :])
        if len(data) != want:
            raise ValueError(f"record at {at}: {len(data)} bytes, header says {want}")
        yield data
        at = len(blob) - len(stream.unused_data)


def is_string_flag(flags: int) -> bool:
    """True for the flag word of a string without attributes."""
    encoding = (flags >> 12) & 0xFF
    return flags & 0xFF == STRING_TYPE and flags >> 20 == 0 and encoding in ENCODING_BITS


def strings(data: bytes) -> Iterator[str]:
    """Yields every string of one serialized R object, in order."""
    at = 0
    while at + 8 <= len(data):
        flags, length = struct.unpack_from(">II", data, at)
        end = at + 8 + length
        if is_string_flag(flags) and end <= len(data):
            yield data[at + 8 : end].decode("utf-8", errors="replace")
            at = end
        else:
            at += 1


def unwrap(text: str) -> str:
    """Joins hard-wrapped lines, so that a paragraph is one line."""
    text = text.replace("\r\n", "\n")
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    return "\n\n".join(p for p in paragraphs if p)


def passage(text: str, start: str, n_bytes: int) -> str:
    """The text from `start` on, cut after the last whole paragraph that fits."""
    at = text.find(start)
    if at < 0:
        raise ValueError(f"no {start!r} in the text")
    kept: list[str] = []
    size = 0
    for paragraph in unwrap(text[at : at + 2 * n_bytes]).split("\n\n"):
        size += len(paragraph.encode()) + 2
        if size > n_bytes:
            break
        kept.append(paragraph)
    return "\n\n".join(kept) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rdb", type=Path, help="Rdata.rdb of the package")
    parser.add_argument("--start", required=True, help="first words of the passage")
    parser.add_argument("--bytes", type=int, default=6000, help="largest size of the passage")
    parser.add_argument("--out", type=Path, required=True, help="text file to write")
    args = parser.parse_args()

    blob = args.rdb.read_bytes()
    text = "\n".join(s for record in records(blob) for s in strings(record))
    found = passage(text, args.start, args.bytes)
    args.out.write_text(found, encoding="utf-8")
    print(f"{args.out}: {len(found.encode())} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
