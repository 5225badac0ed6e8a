#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The support matrix of docs/engines.md, cell by cell: each is a stand-in engine that stores and
loads, or that does neither and says why; and the table in the page is what they did.

usage: test_vllm_support.py KVFERRYD PACKAGE_FOLDER [--write | unittest arguments]
       with KVFERRY_CUDA_DRIVER and KVFERRY_LIBRARY_DIR; --write puts the table into the page
"""
import json
import os
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = sys.argv[2]
sys.path[:0] = [HERE, PACKAGE]

import standin  # noqa: E402

VERSIONS = Path(PACKAGE) / "kvferry/tested_versions.json"
standin.install(json.loads(VERSIONS.read_text())["vllm"][-1])

from standin_gpu import BLOCK, Case, GpuEngine  # noqa: E402

PAGE = Path(HERE) / "../../docs/engines.md"
BEGIN, END = "<!-- support: test_vllm_support.py --write -->", "<!-- support ends -->"
# name in the table -> what the stand-in is told, or what its requests have
MODELS = {"dense": {}, "MLA": {"kind": "mla"}, "sliding windows": {"kind": "window"},
          "dense and sliding windows": {"kind": "hybrid"}, "Mamba": {"kind": "mamba"}}
MODES = {"alone": {}, "TP": {"tp": 2}, "PP": {"pipeline_parallel_size": 2}, "DP": {"dp": 2},
         "DCP": {"dcp": 2}, "speculative": {"speculative_config": "a draft model"},
         "LoRA": {"lora_request": "folder"}, "LoRA, no files": {"lora_request": "a/hub/name"},
         "images": {"mm_features": ["an image"]}, "`prompt_embeds`": {"prompt_embeds": "rows"},
         "KV in fp8": {"cache_dtype": "fp8"}}
OF_REQUESTS = ("lora_request", "mm_features", "prompt_embeds")
NOT_SERVED = "this engine's KV is neither stored nor loaded: "


class Support(Case):
    def ask(self, engine, name, n, more, computes):
        """A request from its beginning to its end: what was loaded, and whether it was right."""
        request = self.request(name, n, **more)
        hit = engine.load(request)
        right = hit == 0 or engine.holds(request, 0, hit // BLOCK)
        if computes:
            engine.allocate(request)
            engine.step({request: (hit, n - hit)}, compute=[(request, hit // BLOCK, n // BLOCK)])
            engine.settle()
        engine.finish(request)
        return hit, right

    def cell(self, model, mode):
        """"yes", or the reason that was given. Fails if there is neither."""
        self.warnings.clear()
        more = {name: mode[name] for name in OF_REQUESTS if name in mode}
        if more.get("lora_request"):
            folder = Path(self.folder) / "adapter"
            folder.mkdir(exist_ok=True)
            (folder / "adapter_model.safetensors").write_bytes(b"an adapter")
            path = str(folder) if more["lora_request"] == "folder" else more["lora_request"]
            more["lora_request"] = SimpleNamespace(lora_path=path)
        changes = {**model, **{name: mode[name] for name in mode if name not in more}}
        tp, dp = changes.pop("tp", 1), changes.pop("dp", 1)
        name = f"{model} {mode}"
        settings = self.settings(namespace=str(abs(hash(name)) % 10**9))
        engines = [GpuEngine(settings, self.device, tp=tp, **changes) for _ in range(dp)]
        try:
            self.assertEqual(self.ask(engines[0], "first", 200, more, True)[0], 0)
            hit, right = self.ask(engines[-1], "again", 230, more, False)
        finally:
            for engine in engines:
                engine.close()
        self.assertTrue(right, name)
        if hit:
            self.assertEqual(hit, 192)
            self.assertEqual([w for w in self.warnings if NOT_SERVED in w], [])
            return "yes"
        said = [w.split(": ", 1)[1] for w in self.warnings if NOT_SERVED in w]
        said = [w[len(NOT_SERVED):] for w in said] or [w.split(": ", 1)[1] for w in self.warnings]
        self.assertTrue(said, f"{name}: nothing is loaded, and nothing said")
        return said[0]

    def table(self):
        """The table and its notes, as the page has them."""
        notes, rows = [], []
        for model in MODELS:
            row = [model]
            for mode in MODES:
                said = self.cell(MODELS[model], MODES[mode])
                if said != "yes":
                    notes += [] if said in notes else [said]
                    said = str(1 + notes.index(said))
                row.append(said)
            rows.append("| " + " | ".join(row) + " |")
        head = "| | " + " | ".join(MODES) + " |\n| " + " | ".join(["---"] * (1 + len(MODES))) + " |"
        said = "\n".join(f"{i}. `{note}`" for i, note in enumerate(notes, 1))
        return "\n".join([head, *rows]) + "\n\n" + said

    def test_page_is_what_the_connector_does(self):
        page = PAGE.read_text(encoding="utf-8")
        begin, rest = page.split(BEGIN)
        written, end = rest.split(END)
        made = self.table()
        if WRITES:
            PAGE.write_text(f"{begin}{BEGIN}\n{made}\n{END}{end}", encoding="utf-8")
        else:
            self.assertEqual(written.strip(), made, "test_vllm_support.py --write makes it anew")

    def test_a_cell_can_fail(self):
        """A connector that takes every engine gives pages of windows back, and is found out."""
        facts = sys.modules["kvferry.vllm.facts"]
        self.addCleanup(setattr, facts, "_unsupported", facts._unsupported)
        facts._unsupported = lambda config: None
        self.assertEqual(self.cell({}, MODES["PP"]), "yes")


WRITES = "--write" in sys.argv
if __name__ == "__main__":
    arguments = [part for part in sys.argv[3:] if part != "--write"]
    unittest.main(argv=[sys.argv[0], *arguments])
