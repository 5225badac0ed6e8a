#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make agent/kvferryd.yaml and the option list of docs/man/kvferryd.yaml.5 from config.def.

The table comes from `kvferryd --print-options`, so that there is one reader of config.def: the C
compiler. With --check nothing is written: exit code 1 says that a committed file is stale.
"""
import argparse
import os
import subprocess
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
YAML_PATH = os.path.join(ROOT, "agent", "kvferryd.yaml")
MAN_PATH = os.path.join(ROOT, "docs", "man", "kvferryd.yaml.5")
MAN_BEGIN = '.\\" begin: made by agent/gen_config_docs.py\n'
MAN_END = '.\\" end: made by agent/gen_config_docs.py\n'

YAML_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
#
# kvferryd.yaml: every option of kvferryd with its default, made by agent/gen_config_docs.py.
#
# Remove the '#' before a line (and before the section above it) to set it. Sizes are whole numbers
# of B, KiB, MiB, GiB or TiB, times of s, min or h. `kvferryd --check --config FILE` says whether a
# file is right and what memory it takes; see kvferryd.yaml(5).
"""

# What the lists are for: their members have rows in the table, they themselves do not.
LIST_TEXT = {
    "sockets": "Sockets for clients, at most 16. One with these values if none is given.",
    "nvme": "Drives, at most 8. None: nothing survives a restart.",
}

# A list needs a value where the table has none.
EXAMPLES = {"nvme[].path": "/var/lib/kvferry/nvme.store"}


class Option:
    def __init__(self, line):
        fields = line.rstrip("\n").split("\t")
        (self.name, self.type, self.default, self.min, self.max, self.words, self.text) = fields
        self.section, _, self.key = self.name.rpartition(".")
        self.is_list = self.section.endswith("[]")
        self.section = self.section.removesuffix("[]")

    def yaml_value(self):
        if self.name in EXAMPLES:
            return EXAMPLES[self.name]
        return self.default if self.default != "" else '""'


def read_options(kvferryd):
    out = subprocess.run([kvferryd, "--print-options"], check=True, capture_output=True, text=True)
    return [Option(line) for line in out.stdout.splitlines()]


def comment(text, indent):
    width = 98 - len(indent)
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, width))


def make_yaml(options):
    out = [YAML_HEAD]
    section = ""
    for option in options:
        is_first = option.section != section
        section = option.section
        words = f" ({option.words.replace('|', ', ')})" if option.words else ""
        out.append("\n" if is_first or section == "" else "")
        if is_first and section != "":
            if option.is_list:
                out.append(comment(LIST_TEXT[section], ""))
            out.append(f"#{section}:\n")
        out.append(comment(option.text + words, ""))
        indent = "" if section == "" else "  "
        if option.is_list:
            indent = "  - " if is_first else "    "
        out.append(f"#{indent}{option.key}: {option.yaml_value()}\n")
    return "".join(out)


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def make_man(options):
    out = [MAN_BEGIN]
    section = None
    for option in options:
        if option.section != section:
            out.append(".El\n" if section is not None else "")
            section = option.section
            title = section if section else "top level"
            out.append(f".Ss {roff(title)}\n")
            if option.is_list:
                out.append(f"{roff(LIST_TEXT[section])}\n")
            out.append(".Bl -tag -width Ds\n")
        default = f", default {roff(option.default)}" if option.default != "" else ""
        out.append(f".It Cm {roff(option.key)} Pq {option.type}{default}\n")
        if option.words:
            out.append(f"One of {roff(option.words.replace('|', ', '))}:\n")
        out.append(f"{roff(option.text[0].upper() + option.text[1:])}.\n")
    out.append(".El\n")
    out.append(MAN_END)
    return "".join(out)


def replace_part(text, part):
    before, _, rest = text.partition(MAN_BEGIN)
    _, _, after = rest.partition(MAN_END)
    return before + part + after


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvferryd", required=True, help="path of the built daemon")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    options = read_options(arguments.kvferryd)
    with open(MAN_PATH, encoding="utf-8") as file:
        old_man = file.read()
    made = {YAML_PATH: make_yaml(options), MAN_PATH: replace_part(old_man, make_man(options))}
    stale = 0
    for path, text in made.items():
        try:
            with open(path, encoding="utf-8") as file:
                is_same = file.read() == text
        except FileNotFoundError:
            is_same = False
        if is_same:
            continue
        if arguments.check:
            print(f"{path} is stale: run agent/gen_config_docs.py --kvferryd {arguments.kvferryd}")
            stale = 1
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
