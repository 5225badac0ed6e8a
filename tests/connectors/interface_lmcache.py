#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What LMCache asks of a native plug-in, read from LMCache's source, not imported.

usage: interface_lmcache.py FOLDER              compare lmcache_interface.json to the package in
                                                FOLDER (the folder that has lmcache/ in it); exit 1
                                                and a line each if not
       interface_lmcache.py FOLDER --write      make the file anew

lmcache_interface.json is of the version that tested_versions.json names; test_lmcache.py holds the
connector against it where there is no LMCache.
"""
import ast
import sys
from pathlib import Path

from interface import command

HERE = Path(__file__).resolve().parent
SNAPSHOT = HERE / "lmcache_interface.json"
ADAPTERS = "lmcache/v1/distributed/l2_adapters"
PLUGIN = f"{ADAPTERS}/native_plugin_l2_adapter.py"
CALLER = f"{ADAPTERS}/native_connector_l2_adapter.py"
CLIENT = ("native_client", "self._client")


def tree(folder, path):
    file = Path(folder) / path
    return ast.parse(file.read_text(encoding="utf-8") if file.exists() else "")


def required(plugin):
    """Methods without which the object is refused."""
    return next((ast.literal_eval(node.value) for node in ast.walk(plugin)
                 if isinstance(node, ast.Assign)
                 and ast.unparse(node.targets[0]) == "required_methods"), [])


def optional(*trees):
    """Methods that are looked for by getattr."""
    return sorted({node.args[1].value for one in trees for node in ast.walk(one)
                   if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
                   and ast.unparse(node.args[0]) in CLIENT
                   and isinstance(node.args[1], ast.Constant)})


def calls(caller):
    """Methods that are called, each with how many arguments."""
    found = {}
    for node in ast.walk(caller):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
                and ast.unparse(node.func.value) in CLIENT:
            found.setdefault(node.func.attr, set()).add(len(node.args) + len(node.keywords))
    return {name: sorted(counts) for name, counts in found.items()}


def completion(caller):
    """What an answer is made of."""
    return [[part.id for part in node.target.elts] for node in ast.walk(caller)
            if isinstance(node, ast.For) and ast.unparse(node.iter) == "completions"
            and isinstance(node.target, ast.Tuple)]


def needs_ok(caller):
    """What is done only where a request as a whole has succeeded."""
    return sorted({ast.unparse(node.test) for node in ast.walk(caller) if isinstance(node, ast.If)
                   and any(isinstance(part, ast.Name) and part.id == "ok"
                           for part in ast.walk(node.test))})


def settings(plugin):
    """Fields of --l2-adapter, and the name of the type."""
    found = {node.args[0].value for node in ast.walk(plugin)
             if isinstance(node, ast.Call) and ast.unparse(node.func) in
             ("d.get", "register_l2_adapter_type") and isinstance(node.args[0], ast.Constant)}
    return sorted(found)


def key(caller):
    """How a key becomes a string."""
    for node in caller.body:
        if isinstance(node, ast.FunctionDef) and node.name == "_object_key_to_string":
            return [ast.unparse(part) for part in node.body
                    if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return []


def read(folder):
    """The interface of the package in a folder."""
    plugin, caller = tree(folder, PLUGIN), tree(folder, CALLER)
    return {"required": required(plugin), "optional": optional(plugin, caller),
            "calls": calls(caller), "completion": completion(caller),
            "needs_ok": needs_ok(caller),
            "settings": settings(plugin), "key": key(caller)}


if __name__ == "__main__":
    sys.exit(command(__doc__, read, SNAPSHOT))
