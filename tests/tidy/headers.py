#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each header compiles alone, so that the order of includes never matters.

The public one must also do so in plain C99 without a warning, for applications with other habits.

    headers.py <root> [--without ucx] -- <compiler> <options>...

Headers that include UCX's are left out when this build has none of it, and counted.
"""
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

FOLDERS = ("base", "transport", "gpu", "codec", "tiers", "client", "agent", "tests")
PUBLIC_FOLDER = "client/include/"
OPTIONAL = {"ucx": re.compile(r"#\s*include\s*<uc[pts]/")}


def find(root):
    for top in FOLDERS:
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in sorted(names):
                if name.endswith(".h"):
                    yield os.path.relpath(os.path.join(folder, name), root)


def compile_alone(root, header, compiler):
    """What the compiler says of a file that includes this header only, twice."""
    spelled = header
    if header.startswith(PUBLIC_FOLDER):
        spelled = header[len(PUBLIC_FOLDER):]
        compiler = [*compiler, "-std=c99", "-pedantic-errors"]
    program = f'#include "{spelled}"\n#include "{spelled}"\nextern int kvf_unused;\n'
    result = subprocess.run([*compiler, "-fsyntax-only", "-x", "c", "-"], input=program, text=True,
                            cwd=root, capture_output=True, check=False)
    return f"{header} does not compile alone:\n{result.stderr}" if result.returncode else ""


def main(arguments):
    split = arguments.index("--")
    root, options, compiler = arguments[0], arguments[1:split], arguments[split + 1:]
    without = [OPTIONAL[name] for name in options if name != "--without"]
    headers = []
    skipped = 0
    for header in find(root):
        with open(os.path.join(root, header), encoding="utf-8") as file:
            text = file.read()
        if any(pattern.search(text) for pattern in without):
            skipped += 1
        else:
            headers.append(header)
    with ThreadPoolExecutor(2) as pool:
        failures = [text for text in pool.map(lambda h: compile_alone(root, h, compiler), headers)
                    if text]
    failures.append(f"{len(headers)} headers, {len(failures)} failures, {skipped} left out")
    print("\n".join(failures))
    return 1 if len(failures) > 1 or not headers else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
