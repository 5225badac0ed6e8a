#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command under a seccomp profile, as a container runtime would, without one.

usage: seccomp_run.py --cc CC [--refuse NAME,...] [--errno N] PROFILE -- COMMAND [ARGUMENT ...]

PROFILE is the JSON that runtimes read: default action, and rules with names and arguments. System
calls named by --refuse are refused whatever it says, with EPERM or the error N; PROFILE may be
"allow". The filter is classic BPF, made here: one comparison for each name. Names that the headers
here do not know are left out, as runtimes do. Exit code 77: this machine takes no filters.
"""
import argparse
import ctypes
import json
import os
import platform
import struct
import subprocess
import sys

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000

# Classic BPF, and where things are in struct seccomp_data.
LOAD, AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, JUMP_AT_LEAST = 0x15, 0x35
AT_NUMBER, AT_ARCH, AT_ARGUMENTS = 0, 4, 16


def syscall_numbers(compiler):
    """{name: number} of this machine, from its headers."""
    done = subprocess.run([compiler, "-dM", "-E", "-"], input="#include <sys/syscall.h>\n",
                          capture_output=True, text=True, check=True)
    defined = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) == 3 and words[1].startswith("__NR"):
            defined[words[1]] = words[2]
    numbers = {}
    for name, value in defined.items():
        while value in defined:
            value = defined[value]
        if name.startswith("__NR_") and value.isdigit():
            numbers[name.removeprefix("__NR_")] = int(value)
    return numbers


def action(name, error):
    if name == "SCMP_ACT_ALLOW":
        return RET_ALLOW
    if name == "SCMP_ACT_ERRNO":
        return RET_ERRNO | error
    raise SystemExit(f"seccomp_run: unknown action {name}")


def step(code, k, if_true=0, if_false=0):
    return (code, if_true, if_false, k)


def compare(argument):
    """Steps that load one argument and jump over what follows the rule's tests unless it matches.
    The jumps are put in by rule(): "miss" stands for them."""
    at = AT_ARGUMENTS + 8 * argument["index"]
    value = argument["value"]
    if argument["op"] == "SCMP_CMP_MASKED_EQ":
        wanted, mask = argument["valueTwo"], value
    elif argument["op"] in ("SCMP_CMP_EQ", "SCMP_CMP_NE"):
        wanted, mask = value, 2**64 - 1
    else:
        raise SystemExit(f"seccomp_run: unknown comparison {argument['op']}")
    halves = []
    for offset, shift in ((0, 0), (4, 32)):
        halves.append((at + offset, mask >> shift & 0xFFFFFFFF, wanted >> shift & 0xFFFFFFFF))
    return halves, argument["op"] != "SCMP_CMP_NE"


def rule(number, result, arguments):
    """Steps for one name. The accumulator holds the number before and after."""
    if not arguments:
        return [step(JUMP_EQUAL, number, 0, 1), step(RETURN, result)]
    if len(arguments) != 1:
        raise SystemExit("seccomp_run: rules on more than one argument are not needed by ours")
    (low, high), is_equal = compare(arguments[0])
    inner = []
    for at, mask, wanted in (low, high):
        inner += [step(LOAD, at), step(AND, mask), ("compare", wanted)]
    inner.append(step(RETURN, result))
    last = len(inner) - 1
    for at, found in enumerate(inner):
        if found[0] != "compare":
            continue
        past = last - at  # behind the return
        if is_equal:
            inner[at] = step(JUMP_EQUAL, found[1], 0, past)
        elif at == last - 1:
            inner[at] = step(JUMP_EQUAL, found[1], past, 0)
        else:  # the low half differs: that is enough
            inner[at] = step(JUMP_EQUAL, found[1], 0, past - 1)
    return [step(JUMP_EQUAL, number, 0, len(inner) + 1), *inner, step(LOAD, AT_NUMBER)]


def compile_profile(profile, refused, error, numbers, arch):
    refuse = action("SCMP_ACT_ERRNO", error)
    default = action(profile["defaultAction"], profile.get("defaultErrnoRet", 1))
    steps = [step(LOAD, AT_ARCH), step(JUMP_EQUAL, arch, 1, 0), step(RETURN, default),
             step(LOAD, AT_NUMBER)]
    if arch == AUDIT_ARCH["x86_64"]:
        steps += [step(JUMP_AT_LEAST, X32_BIT, 0, 1), step(RETURN, default)]
    for name in refused:
        steps += rule(numbers[name], refuse, [])
    for entry in profile.get("syscalls", []):
        result = action(entry["action"], entry.get("errnoRet", 1))
        for name in entry["names"]:
            if name in numbers:
                steps += rule(numbers[name], result, entry.get("args", []))
    steps.append(step(RETURN, default))
    return b"".join(struct.pack("=HBBI", *one) for one in steps)


def load_filter(program):
    """For this process and what it becomes. False: the kernel takes none."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0) == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", default="cc", help="compiler, asked for system call numbers")
    parser.add_argument("--refuse", default="", help="names, with commas between")
    parser.add_argument("--errno", type=int, default=1, help="their error (1: EPERM)")
    parser.add_argument("profile")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if platform.machine() not in AUDIT_ARCH:
        print(f"skipped: seccomp_run does not know {platform.machine()}", file=sys.stderr)
        return 77
    if arguments.profile == "allow":
        profile = {"defaultAction": "SCMP_ACT_ALLOW"}
    else:
        with open(arguments.profile, encoding="utf-8") as file:
            profile = json.load(file)
    refused = [name for name in arguments.refuse.split(",") if name]
    program = compile_profile(profile, refused, arguments.errno, syscall_numbers(arguments.cc),
                              AUDIT_ARCH[platform.machine()])
    if not load_filter(program):
        print(f"skipped: no seccomp filter: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 77
    os.execvp(arguments.command[0], arguments.command)
    return 1


if __name__ == "__main__":
    sys.exit(main())
