#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
#
# check_x_example.py EXAMPLE HEADER_TEST: the structs that the Python example has by ctypes are as
# large as HEADER_TEST pins those of kvferry.h. torch and transformers, which the example imports,
# need not be there.
import ctypes
import importlib.util
import re
import sys
import types

STRUCTS = {"Key": "key", "Geometry": "geometry", "TensorView": "tensor_view", "KvView": "kv_view",
           "Options": "options", "Info": "info", "Hit": "hit", "XWeights": "x_weights",
           "XInput": "x_input", "XPutOptions": "x_put_options", "XFactors": "x_factors",
           "XGateOptions": "x_gate_options", "XChoice": "x_choice"}


def main():
    example, header_test = sys.argv[1:]
    for name in ("torch", "transformers"):
        sys.modules[name] = types.ModuleType(name)
    spec = importlib.util.spec_from_file_location("example", example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with open(header_test, encoding="ascii") as file:
        pinned = dict(re.findall(r"sizeof\(struct kvf_(\w+)\), (\d+)\)", file.read()))
    failed = False
    for name, struct in STRUCTS.items():
        size = ctypes.sizeof(getattr(module, name))
        if size != int(pinned[struct]):
            print(f"{name} has {size} bytes, struct kvf_{struct} {pinned[struct]}")
            failed = True
    print(f"{len(STRUCTS)} structs compared")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
