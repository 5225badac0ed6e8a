#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make what the chart says about options of kvferryd, and the table of its README.

From `kvferryd --print-options`: the part `config` of kvferry/values.schema.json and the values of
VALUES there, and kvferry/files/options.json, by which templates/validation.yaml refuses options
that the chart decides and sizes and times out of range. From dashboard.py:
kvferry/files/dashboard.json. From kvferry/values.yaml: the table of kvferry/README.md.
With --check nothing is written: exit code 1 says that a committed file is stale.
"""
import argparse
import json
import os
import re
import subprocess
import sys

import dashboard

CHART = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kvferry")
TABLE_BEGIN = "<!-- begin: made by charts/gen_chart.py -->\n"
TABLE_END = "<!-- end: made by charts/gen_chart.py -->\n"

# Options that the chart decides, and the value to set instead.
OWNED = {
    "sockets": "set tenants and socket.hostPath",
    "nvme": "set nvme.enabled, nvme.bytes and the other values of nvme",
    "mode": "set mode, beside config",
    "dram.bytes": "set arena.bytes",
    "dram.hugepages": "set arena.hugepages",
    "calibration.dir": "set calibration.configMap",
    "cluster_key": "set clusterKey.secretName",
    "gpu.devices": "set gpu.access and gpu.devices",
    "gpu.worker": "the image holds kvferryd-gpu beside kvferryd",
    "peers.listen": "set peers.enabled and peers.port",
    "peers.nodes": "set peers.enabled, and peers.nodes for daemons of other releases",
    "directory.address": "set peers.directory.address",
    "directory.user": "set peers.directory.user",
    "directory.password_file": "set peers.directory.passwordSecret",
    "admin.socket": "it is /run/kvferry-admin/admin.sock in the pod, where no tenant sees it",
    "admin.mode": "only the daemon's user can open /run/kvferry-admin in the pod",
    "admin.listen": "set metrics.address and metrics.port",
    "test.fault_dram": "a chart injects no faults; start kvferryd by hand for that",
    "test.fault_nvme": "a chart injects no faults; start kvferryd by hand for that",
    "test.delay_nvme": "a chart injects no delays; start kvferryd by hand for that",
}

# Values that are options of the daemon under another name.
VALUES = {
    "mode": "mode",
    "nvme.admission": "nvme[].admission",
    "nvme.engine": "nvme[].engine",
    "nvme.recompress": "nvme[].recompress",
}

SIZE_PATTERN = r"^([0-9]{1,15} ?(B|KiB)?|[0-9]{1,9} ?MiB|[0-9]{1,6} ?GiB|[0-9]{1,4} ?TiB)$"
SECONDS_PATTERN = r"^(0|[0-9]{1,7} ?(s|min|h))$"
TEMPLATE_INTEGER_MAX = 2**62  # templates count in 64 bits with a sign


class Option:
    def __init__(self, line):
        (self.name, self.type, self.default, least, most, words, self.text) = line.split("\t")
        self.least, self.most = int(least), int(most)
        self.words = words.split("|")
        self.section, _, self.key = self.name.rpartition(".")

    def schema(self):
        """What values.schema.json says of it."""
        default = f" Default: {self.default}." if self.default else ""
        about = {"description": self.text[0].upper() + self.text[1:] + "." + default}
        if self.name in OWNED:
            return {"description": f"Decided by the chart: {OWNED[self.name]}."}
        if self.type in ("size", "rate"):
            return {**about, "type": "string", "pattern": SIZE_PATTERN}
        if self.type == "duration":
            return {**about, "type": "string", "pattern": SECONDS_PATTERN}
        if self.type in ("count", "percent"):
            return {**about, "type": "integer", "minimum": self.least, "maximum": self.most}
        if self.type == "bool":
            return {**about, "type": "boolean"}
        if self.type == "word":
            return {**about, "type": "string", "enum": self.words}
        return {**about, "type": "string", "minLength": self.least, "maxLength": self.most}

    def range(self):
        """What a pattern cannot see: least and most of sizes and times. None: nothing."""
        if self.name in OWNED or self.type not in ("size", "rate", "duration"):
            return None
        found = {"unit": "seconds" if self.type == "duration" else "bytes", "min": self.least,
                 "least": self.written(self.least)}
        if self.most < TEMPLATE_INTEGER_MAX:
            found.update(max=self.most, most=self.written(self.most))
        return found

    def written(self, number):
        if self.type == "duration":
            return f"{number}s"
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if number >= size and number % size == 0:
                return f"{number // size}{unit}"
        return str(number)


def read_options(kvferryd):
    out = subprocess.run([kvferryd, "--print-options"], check=True, capture_output=True, text=True)
    return [Option(line) for line in out.stdout.splitlines()]


def config_schema(options):
    """The schema of `config`; lists belong to the chart and have one entry each."""
    top = {}
    for option in options:
        if option.section.endswith("[]"):
            name = option.section.removesuffix("[]")
            top[name] = {"description": f"Decided by the chart: {OWNED[name]}."}
        elif option.section == "":
            top[option.key] = option.schema()
        else:
            section = top.setdefault(option.section, {"type": "object", "properties": {},
                                                      "additionalProperties": False})
            section["properties"][option.key] = option.schema()
    return {"description": "Further options of kvferryd, made from config.def.", "type": "object",
            "properties": top, "additionalProperties": False}


def set_values(schema, options):
    """What VALUES may be set to."""
    words = {option.name: option.words for option in options}
    for value, option in VALUES.items():
        *path, key = value.split(".")
        at = schema
        for word in path:
            at = at["properties"][word]
        at["properties"][key] = {"type": "string", "enum": words[option]}


def make_options(options):
    ranges = {option.name: option.range() for option in options if option.range()}
    return {"owned": OWNED, "ranges": ranges}


# --- README ---------------------------------------------------------------------------------------

def value_rows(text):
    """(name, default, description) of each value with a "# --" comment."""
    path = []  # (indent, key)
    about = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = re.match(r"( *)# -- (.*)", line)
        if found:
            about = found.group(2)
            continue
        found = re.match(r"( *)([A-Za-z]\w*):(?: (.*))?$", line)
        if not found:
            continue
        indent = len(found.group(1))
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, found.group(2)))
        if about is not None:
            yield ".".join(key for _, key in path), default_of(lines, number, found), about
            about = None


def default_of(lines, number, found):
    """A value as one line: what follows the colon, or the lines below it."""
    if found.group(3) is not None:
        return found.group(3)
    below = []
    for line in lines[number + 1:]:
        if len(line) - len(line.lstrip()) <= len(found.group(1)):
            break
        below.append(line.strip().removeprefix("- "))
    if lines[number + 1].lstrip().startswith("- "):
        return "[{" + ", ".join(below) + "}]"
    return "{" + ", ".join(below) + "}"


def make_table(text):
    rows = ["| value | default | what it is |", "| --- | --- | --- |"]
    for name, default, about in value_rows(text):
        about = about.replace("|", "\\|")
        rows.append(f"| `{name}` | `{default}` | {about} |")
    return "\n".join(rows) + "\n"


def replace_table(text, table):
    before, _, rest = text.partition(TABLE_BEGIN)
    _, _, after = rest.partition(TABLE_END)
    return before + TABLE_BEGIN + "\n" + table + "\n" + TABLE_END + after


# --------------------------------------------------------------------------------------------------

def read(*path):
    try:
        with open(os.path.join(CHART, *path), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def make_files(options):
    """{path in the chart: text}"""
    schema = json.loads(read("values.schema.json"))
    schema["properties"]["config"] = config_schema(options)
    set_values(schema, options)
    return {
        "values.schema.json": json.dumps(schema, indent=2) + "\n",
        os.path.join("files", "options.json"): json.dumps(make_options(options), indent=2) + "\n",
        os.path.join("files", "dashboard.json"):
            json.dumps(dashboard.make_dashboard(), indent=2) + "\n",
        "README.md": replace_table(read("README.md"), make_table(read("values.yaml"))),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvferryd", required=True, help="path of the built daemon")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    options = read_options(arguments.kvferryd)
    lists = {option.section.removesuffix("[]") for option in options if "[]" in option.section}
    gone = set(OWNED) - {option.name for option in options} - lists
    if gone:
        print(f"OWNED of charts/gen_chart.py names options that kvferryd does not have: {gone}")
        return 1
    stale = 0
    for path, text in make_files(options).items():
        if read(path) == text:
            continue
        if arguments.check:
            print(f"charts/kvferry/{path} is stale: run charts/gen_chart.py --kvferryd "
                  f"{arguments.kvferryd}")
            stale = 1
        else:
            with open(os.path.join(CHART, path), "w", encoding="utf-8") as file:
                file.write(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
