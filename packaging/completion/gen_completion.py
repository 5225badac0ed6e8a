#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the completions of kvferry and kvferryd for bash (kvferry) and zsh (_kvferry) from what the
programs say with --help. With --check nothing is written: exit code 1 says that a file is stale.
"""
import argparse
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Arguments that are one of some words, by their option or command; other ones may be files.
WORDS = {
    "--output": "text json",
    "--admission": "auto all second-sight",
    "--rope-state": "post pre auto",
    "log-level": "error warning info debug",
    "trace": "record",
}
HEAD = "SPDX-License-Identifier: Apache-2.0\n#\n# Made by packaging/completion/gen_completion.py.\n"


def help_of(*command):
    return subprocess.run([*command, "--help"], check=True, capture_output=True, text=True).stdout


def options_of(text):
    """[(option, argument or "", what it is)]"""
    rows = re.findall(r"^ +(--[\w-]+),?(?: +([A-Z][A-Z/,\[\]=]*|text\|json)(?= ))? +(\S.*)$", text,
                      re.MULTILINE)
    found = {}  # the first line that begins with an option is about it
    for name, argument, about in rows:
        if about == "--version":
            found[about] = (about, "", "print the version")
            about = "print help"
        found.setdefault(name, (name, argument, about))
    return list(found.values())


def read_commands(kvferry):
    """{command: (summary, options)}"""
    _, _, rest = help_of(kvferry).partition("\ncommands:\n")
    rows = re.findall(r"^ {4}([a-z-]+) +(\S.*)$", rest.partition("\n\n")[0], re.MULTILINE)
    return {name: (about, options_of(help_of(kvferry, name))) for name, about in rows}


def make_bash(commands, daemon):
    taking = sorted({name for _, options in commands.values() for name, argument, _ in options
                     if argument and name not in WORDS} |
                    {name for name, argument, _ in daemon if argument})
    lines = ["# " + HEAD, "_kvferry() {",
             "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} words=",
             "    COMPREPLY=()", "    case $prev in"]
    for option, words in WORDS.items():
        lines += [f"    {option})", f'        COMPREPLY=($(compgen -W "{words}" -- "$cur"))',
                  "        return", "        ;;"]
    lines += ["    " + " | ".join(taking) + ")", '        COMPREPLY=($(compgen -f -- "$cur"))',
              "        return", "        ;;", "    esac", "    case ${COMP_WORDS[0]##*/} in",
              "    kvferryd)", f'        words="{" ".join(name for name, _, _ in daemon)}"',
              "        ;;", "    *)",
              "        case $COMP_CWORD:${COMP_WORDS[1]} in", "        1:*)",
              f'            words="{" ".join(commands)} --help --version"', "            ;;"]
    for name, (_, options) in commands.items():
        lines += [f"        *:{name})", f'            words="{" ".join(o for o, _, _ in options)}"',
                  "            ;;"]
    lines += ["        esac", "        ;;", "    esac",
              '    if [[ $COMP_CWORD -eq 1 || $cur == -* ]]; then',
              '        COMPREPLY=($(compgen -W "$words" -- "$cur"))', "    else",
              '        COMPREPLY=($(compgen -f -- "$cur"))', "    fi", "}",
              "complete -o filenames -F _kvferry kvferry kvferryd"]
    return "\n".join(lines) + "\n"


def zsh_option(name, argument, about):
    about = re.sub(r"([\[\]:'\\])", r"", about)
    more = ""
    if argument:
        more = f":{argument.replace(':', ' ')}:" + (f"({WORDS[name]})" if name in WORDS else
                                                    "_files")
    return f"'*{name}[{about}]{more}'"


def make_zsh(commands, daemon):
    lines = ["#compdef kvferry kvferryd", "# " + HEAD, "_kvferry() {",
             "    if [[ $service == kvferryd ]]; then", "        _arguments \\"]
    lines += [" \\\n".join(12 * " " + zsh_option(*row) for row in daemon), "        return",
              "    fi",
              "    if ((CURRENT == 2)); then", "        local -a commands=("]
    for name, (about, _) in commands.items():
        about = about.replace("'", "")
        lines.append(f"            '{name}:{about}'")
    lines += ["        )", "        _describe command commands", "        return", "    fi",
              "    local command=$words[2]", "    shift words", "    ((CURRENT--))",
              "    case $command in"]
    for name, (_, options) in commands.items():
        rest = f"'*:argument:({WORDS[name]})'" if name in WORDS else "'*:file:_files'"
        rows = [zsh_option(*row) for row in options] + [rest]
        lines += [f"    {name})", "        _arguments \\",
                  " \\\n".join(12 * " " + row for row in rows), "        ;;"]
    lines += ["    esac", "}", '_kvferry "$@"']
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvferry", required=True)
    parser.add_argument("--kvferryd", required=True)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    commands = read_commands(arguments.kvferry)
    daemon = options_of(help_of(arguments.kvferryd))
    stale = 0
    for name, text in (("kvferry", make_bash(commands, daemon)),
                       ("_kvferry", make_zsh(commands, daemon))):
        path = os.path.join(HERE, name)
        before = ""
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                before = file.read()
        if before == text:
            continue
        if arguments.check:
            print(f"packaging/completion/{name} is stale: run gen_completion.py beside it")
            stale = 1
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
