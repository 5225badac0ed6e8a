#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The house rules as a test: run over the whole tree, one line for each thing to mend.

    tidy.py <root>              check everything
    tidy.py --rules             list the rules

A rule looks at one file and yields (line number, what is wrong, name). What is wrong today and may
stay for now is in exceptions.txt beside this file: rule, path, name. An exception that is no longer
needed is a failure too, so that the list can only shrink.
"""
import os
import re
import sys

FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
FILE_LINES_MAX = 1000

C_ENDINGS = (".c", ".h", ".cc", ".cu", ".cuh", ".def")
SCRIPT_ENDINGS = (".py", ".sh", ".cmake")
SCRIPT_NAMES = ("CMakeLists.txt", "Makefile", "run")
TEXT_ENDINGS = C_ENDINGS + SCRIPT_ENDINGS + (
    ".md", ".yaml", ".yml", ".json", ".toml", ".in", ".txt", ".map", ".tpl", ".1", ".5", ".7", ".8")
SKIPPED_FOLDERS = {".git", "out", "__pycache__", ".venv", ".pytest_cache", "node_modules"}

# What each folder of the product may include, beside the public header. Dependencies point one way.
LAYERS = {
    "base": {"base"},
    "transport": {"base", "transport"},
    "gpu": {"base", "gpu"},
    "codec": {"base", "gpu", "codec"},
    "tiers": {"base", "transport", "gpu", "codec", "tiers"},
    "agent": {"base", "transport", "gpu", "codec", "tiers", "agent"},
    "client": {"base", "transport", "gpu", "codec", "client"},
    "connectors": {"connectors"},
}
# The daemon's GPU worker is a client of the daemon, and has the client's GPU library in it.
WORKER_PREFIX = "agent/gpud"
# The command replays traces on the daemon's own code: this header is the way to it.
REPLAY_PREFIX = "client/cli_"
REPLAY_HEADER = "agent/replay.h"
PUBLIC_HEADERS = ("kvferry.h", "kvferry_gpu_x.h")

# Calls with a better one to take instead, and why.
BANNED = {
    "strcpy": "no bound: snprintf",
    "strcat": "no bound: snprintf",
    "sprintf": "no bound: snprintf",
    "vsprintf": "no bound: vsnprintf",
    "gets": "no bound: fgets",
    "strtok": "hidden state: strtok_r or strcspn",
    "atoi": "no errors: base/parse.h",
    "atol": "no errors: base/parse.h",
    "atoll": "no errors: base/parse.h",
    "atof": "no errors: strtod",
    "rand": "not random, not repeatable: base/random.h",
    "srand": "not random, not repeatable: base/random.h",
    "random": "shared state: base/random.h",
    "drand48": "shared state: base/random.h",
    "alloca": "no bound on the stack",
    "usleep": "obsolete: nanosleep",
    "tmpnam": "a race: mkstemp",
    "mktemp": "a race: mkstemp",
    "gmtime": "shared state: gmtime_r",
    "localtime": "shared state: localtime_r",
    "ctime": "shared state: strftime",
    "asctime": "shared state: strftime",
    "system": "runs a shell: posix_spawn",
    "popen": "runs a shell: posix_spawn",
}
# In the product only: these break hosts with threads, CUDA contexts and pinned memory.
BANNED_IN_PRODUCT = {
    "fork": "breaks threads and CUDA: posix_spawn",
    "vfork": "breaks threads and CUDA: posix_spawn",
    "setjmp": "skips clean-up",
    "longjmp": "skips clean-up",
    "exit": "ends the host process: return a status",
}
# Who may end its process: programs, by name.
PROGRAMS = {"agent/main.c", "client/kvferry.c"}

# Split, so that this file does not match itself.
MACHINE_PATHS = re.compile(
    "|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + r"me/\w", "/tmp/bu" + "ild"]))

SPDX = "SPDX-License-Identifier: Apache-2.0"


class Source:
    """One file: its text, and for C the same text with comments and strings blanked."""

    def __init__(self, path, text):
        self.path = path
        self.text = text
        self.lines = text.split("\n")
        if self.lines and self.lines[-1] == "":
            self.lines.pop()
        self.is_c = path.endswith(C_ENDINGS)
        self.is_script = path.endswith(SCRIPT_ENDINGS) or os.path.basename(path) in SCRIPT_NAMES
        self.folder = path.split("/", 1)[0] if "/" in path else ""
        self.is_product = self.folder in LAYERS
        self.code = blank(text).split("\n") if self.is_c else []


def blank(text):
    """C text with comments, strings and character constants replaced by spaces, lines kept."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def functions(source):
    """(name, first line, body lines) of each C function: braces in column one, as formatted."""
    signature = ""
    start = None
    name = ""
    for number, line in enumerate(source.code, 1):
        if start is None:
            if line.rstrip() == "{":
                found = re.search(r"([A-Za-z_]\w*)\s*\(", re.sub(r"__\w+__\s*\(+[^)]*\)+", "",
                                                                signature))
                start, name = number, found.group(1) if found else "?"
            elif re.match(r"\s*$|#|.*[;}]\s*$", line):
                signature = ""
            else:
                signature += " " + line
        elif line.startswith("}"):
            yield name, start, number - start - 1
            start, signature = None, ""


def rule_function_length(source):
    """a C function has at most 70 lines between its braces"""
    if source.is_c:
        for name, number, count in functions(source):
            if count > FUNCTION_LINES_MAX:
                yield number, f"{name} has {count} lines (at most {FUNCTION_LINES_MAX})", name


def rule_line_length(source):
    """a line of code has at most 100 columns"""
    if source.is_c or source.is_script:
        for number, line in enumerate(source.lines, 1):
            if len(line) > COLUMNS_MAX:
                yield number, f"{len(line)} columns (at most {COLUMNS_MAX})", "-"


def rule_file_length(source):
    """a file of code has at most 1000 lines"""
    if (source.is_c or source.is_script) and len(source.lines) > FILE_LINES_MAX:
        yield len(source.lines), f"{len(source.lines)} lines (at most {FILE_LINES_MAX})", "-"


def rule_whitespace(source):
    """no tab in C, no blank at a line's end, a newline at the file's end"""
    for number, line in enumerate(source.lines, 1):
        if line.rstrip() != line and not source.path.endswith(".md"):
            yield number, "blank at the end of the line", "-"
        if source.is_c and "\t" in line:
            yield number, "tab", "-"
    if source.text and not source.text.endswith("\n"):
        yield len(source.lines), "no newline at the end of the file", "-"


def rule_spdx(source):
    """a file of code opens with its licence (after #! in scripts)"""
    if not (source.is_c or source.is_script) or not source.lines:
        return
    first = 1 if source.lines[0].startswith("#!") and len(source.lines) > 1 else 0
    if SPDX not in source.lines[first]:
        yield first + 1, f"the first line is not '{SPDX}'", "-"


def rule_purpose(source):
    """a C file says what it is for, in the comment that opens it"""
    if not source.is_c:
        return
    opening = re.match(r"(\s*/\*.*?\*/)*", source.text, re.DOTALL).group()
    words = re.findall(r"[A-Za-z]{2,}", opening.replace(SPDX, ""))
    if len(words) < 4:
        yield 1, "the opening comment does not say what the file is for", "-"


def rule_includes(source):
    """includes are qualified by folder and point one way"""
    if not source.is_c:
        return
    for number, line in enumerate(source.lines, 1):
        found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not found:
            continue
        target = found.group(1)
        if target in PUBLIC_HEADERS:
            continue
        folder = target.split("/", 1)[0]
        if "/" not in target:
            yield number, f'"{target}" is not qualified by its folder', target
        elif source.path.startswith(WORKER_PREFIX) and folder == "client":
            continue
        elif source.path.startswith(REPLAY_PREFIX) and target == REPLAY_HEADER:
            continue
        elif source.is_product and folder not in LAYERS[source.folder]:
            yield number, f'{source.folder} may not include "{target}"', target
        elif folder not in LAYERS and folder != "tests":
            yield number, f'"{target}" is in no folder of ours', target


def rule_banned_calls(source):
    """no call that has no bound, no errors, hidden state, or breaks a host process"""
    if not source.is_c:
        return
    banned = dict(BANNED)
    if source.is_product and source.path not in PROGRAMS and "/examples/" not in source.path:
        banned.update(BANNED_IN_PRODUCT)
    pattern = re.compile(r"(?<![\w.>])(" + "|".join(banned) + r")\s*\(")
    for number, line in enumerate(source.code, 1):
        for found in pattern.finditer(line):
            yield number, f"{found.group(1)}: {banned[found.group(1)]}", found.group(1)


def rule_cloexec(source):
    """descriptors of the product do not leak into programs that its host starts"""
    if not (source.is_c and source.is_product):
        return
    wanted = {"open": "O_CLOEXEC", "openat": "O_CLOEXEC", "socket": "SOCK_CLOEXEC",
              "socketpair": "SOCK_CLOEXEC", "accept4": "SOCK_CLOEXEC", "eventfd": "EFD_CLOEXEC",
              "epoll_create1": "EPOLL_CLOEXEC", "timerfd_create": "TFD_CLOEXEC",
              "memfd_create": "MFD_CLOEXEC", "pipe2": "O_CLOEXEC"}
    code = "\n".join(source.code)
    for found in re.finditer(r"(?<![\w.>])(" + "|".join(wanted) + r")\s*\(([^;]*);", code):
        call, arguments = found.groups()
        number = code.count("\n", 0, found.start()) + 1
        if wanted[call] not in arguments and "flags" not in arguments:
            yield number, f"{call} without {wanted[call]}", call
    for found in re.finditer(r"(?<![\w.>])(accept|epoll_create|pipe|dup)\s*\(", code):
        number = code.count("\n", 0, found.start()) + 1
        yield number, f"{found.group(1)} cannot set close-on-exec", found.group(1)


def rule_machine_paths(source):
    """no path of somebody's machine"""
    for number, line in enumerate(source.lines, 1):
        found = MACHINE_PATHS.search(line)
        if found:
            yield number, f"a path of one machine: {found.group()}", "-"


def rule_leftovers(source):
    """no note of work undone"""
    if not (source.is_c or source.is_script):
        return
    pattern = re.compile(r"\b(TO" + "DO|FIX" + "ME|X" + r"XX)\b")
    for number, line in enumerate(source.lines, 1):
        if pattern.search(line):
            yield number, "work undone", "-"


def rule_comment_form(source):
    """comments in C are /* */"""
    if source.is_c:
        text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', source.text)
        text = re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found.group()), text,
                      flags=re.DOTALL)
        for number, line in enumerate(text.split("\n"), 1):
            if "//" in line:
                yield number, "a // comment", "-"


RULES = {name[len("rule_"):]: function for name, function in list(globals().items())
         if name.startswith("rule_")}


def tree_rules(sources):
    """What no single file shows: (rule, path, line, what, name)."""
    by_path = {source.path: source for source in sources}

    header = by_path.get("client/include/kvferry.h")
    status = by_path.get("base/status.c")
    if header and status:
        enum = re.search(r"enum kvf_status \{(.*?)\n\};", header.text, re.DOTALL).group(1)
        for name in re.findall(r"^\s*(KVF_\w+) = -?\d+", enum, re.MULTILINE):
            if not re.search(r"\{\s*" + name + r"\b", status.text):
                yield "status_names", status.path, 1, f"{name} has no name and text", name

    makefile = by_path.get("Makefile")
    cmake = by_path.get("CMakeLists.txt")
    if makefile and cmake:
        needs = set(re.findall(r"^    ([\w.+-]+):(?:program|module)=", makefile.text, re.MULTILINE))
        for package in re.findall(r"kvf_require\(\S+ \"[^\"]+\" ([\w.+-]+)\)", cmake.text):
            if package not in needs:
                yield "packages", makefile.path, 1, f"{package} is not in NEEDS", package
        for readme in ("README.md", "CONTRIBUTING.md"):
            if readme in by_path:
                for line in re.findall(r"apt-get install ([^\n`]*)", by_path[readme].text):
                    for package in re.findall(r"\blib[\w.+-]+-dev\b", line):
                        if package not in needs:
                            yield "packages", readme, 1, f"{package} is not in NEEDS", package

    table = by_path.get("base/failpoint.def")
    if table:
        used = set()
        for source in sources:
            if source.is_product and source.is_c:
                used.update(re.findall(r"KVF_FAILPOINT(?:_|\()(\w+)", "\n".join(source.code)))
        for number, line in enumerate(table.code, 1):
            entry = re.match(r"KVF_FAILPOINT_ENTRY\((\w+), (\w+)\)", line)
            if entry and "_".join(entry.groups()) not in used:
                name = ".".join(entry.groups())
                yield "failpoints", table.path, number, f"{name} is at no place in the code", name

    seen = {}
    for source in sources:
        if source.is_product and source.is_c:
            base = os.path.basename(source.path)
            if base in seen:
                yield ("basenames", source.path, 1,
                       f"the name {base} is taken by {seen[base]}: backtraces show basenames", base)
            seen.setdefault(base, source.path)


def load(root):
    sources = []
    for folder, folders, names in os.walk(root):
        relative = os.path.relpath(folder, root)
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS
                            and not (relative == "." and name.startswith("build"))
                            and not name.endswith(".egg-info"))
        for name in sorted(names):
            path = os.path.normpath(os.path.join(relative, name))
            if not (path.endswith(TEXT_ENDINGS) or name in SCRIPT_NAMES):
                continue
            # data are bytes of somebody else's format
            if path.startswith(("tests/data/", "tests/fuzz/corpus_")) and not path.endswith(
                    C_ENDINGS + SCRIPT_ENDINGS):
                continue
            with open(os.path.join(folder, name), encoding="utf-8", newline="") as file:
                sources.append(Source(path, file.read()))
    return sources


def findings(sources):
    for source in sources:
        for rule, function in RULES.items():
            for number, what, name in function(source):
                yield rule, source.path, number, what, name
    yield from tree_rules(sources)


def read_exceptions(path):
    exceptions = set()
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.split("#", 1)[0].split()
            if not line:
                continue
            if len(line) != 3:
                sys.exit(f"{path}:{number}: not 'rule path name'")
            exceptions.add(tuple(line))
    return exceptions


def check(sources, exceptions):
    """The lines to print; none if all is well."""
    problems = []
    used = set()
    for rule, path, number, what, name in findings(sources):
        if (rule, path, name) in exceptions:
            used.add((rule, path, name))
        else:
            problems.append(f"{path}:{number}: {rule}: {what} [{name}]")
    for rule, path, name in sorted(exceptions - used):
        problems.append(f"tests/tidy/exceptions.txt: no longer needed: {rule} {path} {name}")
    return problems


def main(arguments):
    if arguments == ["--rules"]:
        for name, function in RULES.items():
            print(f"{name}: {function.__doc__}")
        return 0
    if len(arguments) != 1:
        sys.exit(__doc__)
    root = arguments[0]
    sources = load(root)
    problems = check(sources, read_exceptions(os.path.join(root, "tests/tidy/exceptions.txt")))
    print("\n".join(problems + [f"{len(sources)} files, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
