# SPDX-License-Identifier: Apache-2.0
#
# check_symbols.py FOLDER LIBRARY NM [gpu]: the library exports the functions of the folder's
# headers and nothing else, and all in version nodes: those of kvf_gpu_* are libkvferry_gpu's,
# others libkvferry's. KVFERRY_PRIVATE is what libkvferry has for libkvferry_gpu.
import re
import subprocess
import sys
from pathlib import Path


def main():
    folder, library = Path(sys.argv[1]), sys.argv[2]
    nm = sys.argv[3]
    is_gpu = sys.argv[4:] == ["gpu"]
    text = "".join(header.read_text(encoding="ascii") for header in sorted(folder.glob("*.h")))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    declared = set(re.findall(r"\bKVF_API\b[^;(]*?\b(kvf_\w+)\s*\(", text))
    declared = {name for name in declared if name.startswith("kvf_gpu_") == is_gpu}
    lines = subprocess.run(
        [nm, "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    exported = set()
    failed = False
    for line in lines:
        kind, name = line.split()[-2:]
        if kind == "A":  # the version node itself
            continue
        base, _, version = name.partition("@@")
        if version == "KVFERRY_PRIVATE" and not is_gpu and base not in declared:
            continue
        exported.add(base)
        if not version.startswith("KVFERRY_"):
            print(f"{name}: exported without a version")
            failed = True
    for name in sorted(declared - exported):
        print(f"{name}: in the header, not exported")
    for name in sorted(exported - declared):
        print(f"{name}: exported, not in the header")
    print(f"{len(declared)} declared, {len(exported)} exported")
    return 1 if failed or declared != exported or not declared else 0


if __name__ == "__main__":
    sys.exit(main())
