#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""clang-format 14 would change nothing. Other versions format differently: skipped (77) then.

    format.py <root>
"""
import os
import re
import shutil
import subprocess
import sys

FOLDERS = ("base", "transport", "gpu", "codec", "tiers", "client", "agent", "tests", "connectors")
ENDINGS = (".c", ".h", ".cc", ".cu", ".cuh")
VERSION = "14"
SKIP = 77


def find_formatter():
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if re.search(rf"version {VERSION}\.", said.stdout):
                return path
    return None


def main(arguments):
    root = arguments[0]
    formatter = find_formatter()
    if not formatter:
        print(f"skipped: no clang-format {VERSION}")
        return SKIP
    files = sorted(os.path.relpath(os.path.join(folder, name), root)
                   for top in FOLDERS for folder, _, names in os.walk(os.path.join(root, top))
                   for name in names if name.endswith(ENDINGS))
    result = subprocess.run([formatter, "--dry-run", "--Werror", *files], cwd=root, text=True,
                            capture_output=True, check=False)
    changed = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", result.stderr, re.MULTILINE)))
    for path in changed:
        print(f"{path}: run clang-format -i")
    if result.returncode and not changed:
        print(result.stderr)
    print(f"{len(files)} files, {len(changed)} to format")
    return 1 if result.returncode else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
