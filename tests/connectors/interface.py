#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the connector takes of an engine's interface, read from the engine's source, not imported.

usage: interface.py FOLDER              compare vllm_interface.json to the package in FOLDER (the
                                        folder that has vllm/ in it); exit 1 and a line each if not
       interface.py FOLDER --write      make the file anew

vllm_interface.json is of the version that tested_versions.json names. The tests build a stand-in
of vLLM from it, so that they run without vLLM and against its interface all the same.
"""
import ast
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SNAPSHOT = HERE / "vllm_interface.json"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
# Classes whose methods we override or call, and classes whose fields we read.
METRICS = "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py"
METHODS = {BASE: ["KVConnectorBase_V1", "SupportsHMA", "KVConnectorWorkerMetadata"],
           METRICS: ["KVConnectorStats", "KVConnectorPromMetrics"]}
FIELDS = {
    "vllm/v1/core/sched/output.py": {
        "NewRequestData": ["req_id", "block_ids", "num_computed_tokens"],
        "CachedRequestData": ["req_ids", "resumed_req_ids", "new_block_ids",
                              "num_computed_tokens"],
        "SchedulerOutput": ["scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
                            "kv_connector_metadata"]},
    "vllm/v1/outputs.py": {
        "KVConnectorOutput": ["finished_recving", "invalid_block_ids", "kv_connector_worker_meta"]},
    "vllm/v1/request.py": {
        "Request": ["request_id", "block_hashes", "num_tokens", "num_prompt_tokens", "mm_features",
                    "prompt_embeds", "lora_request", "all_token_ids", "num_preemptions",
                    "kv_transfer_params", "sampling_params",
                    "skip_reading_prefix_cache"]},
    "vllm/distributed/kv_events.py": {
        "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
                        "medium", "lora_name", "group_idx", "locality", "ownership"],
        "BlockRemoved": ["block_hashes", "medium", "group_idx", "locality", "ownership"]},
    "vllm/config/kv_events.py": {"KVEventsConfig": ["enable_kv_cache_events"]},
    "vllm/config/kv_transfer.py": {
        "KVTransferConfig": ["kv_connector_extra_config", "kv_load_failure_policy"]},
    "vllm/config/parallel.py": {
        "ParallelConfig": ["pipeline_parallel_size", "tensor_parallel_size",
                           "decode_context_parallel_size", "prefill_context_parallel_size"]},
    "vllm/v1/kv_cache_interface.py": {
        "KVCacheConfig": ["kv_cache_groups"],
        "KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
        "AttentionSpec": ["num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode",
                          "page_size_padded", "page_size_bytes"],
        "UniformTypeKVCacheSpecs": ["kv_cache_specs"]}}
NAMES = {"vllm/v1/core/kv_cache_utils.py": ["NONE_HASH", "maybe_convert_block_hash"],
         "vllm/distributed/kv_events.py": ["MEDIUM_CPU"],
         "vllm/v1/metrics/cache_hit_source.py": ["CacheHitSource"],
         "vllm/distributed/parallel_state.py": ["get_tensor_model_parallel_rank"],
         "vllm/v1/attention/backends/cpu_attn.py": ["_get_attn_isa"]}


def method(node):
    """Parameters, and how the method is to be had."""
    decorators = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    arguments = node.args
    names = [a.arg for a in arguments.posonlyargs + arguments.args]
    return {"parameters": names, "keywords": arguments.kwarg is not None,
            "abstract": "abstractmethod" in decorators,
            "kind": next((k for k in ("property", "classmethod", "staticmethod")
                          if k in decorators), "method")}


def members(node):
    """Names that an object of a class has: fields, properties, methods, and self.x = ..."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, (ast.Assign, ast.AnnAssign)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            found.update(ast.unparse(t)[5:] for t in targets
                         if ast.unparse(t).startswith("self."))
    return found


def classes(tree):
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def top_names(tree):
    found = {node.name for node in tree.body if hasattr(node, "name")}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(t.id for t in node.targets if isinstance(t, ast.Name))
    return found


def read(folder):
    """The interface of the package in a folder."""
    trees = {}
    for path in {*METHODS, *FIELDS, *NAMES}:
        file = Path(folder) / path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        trees[path] = ast.parse(text)
    made = {"methods": {}, "fields": {}, "names": {}}
    for path, names in METHODS.items():
        for name in names:
            node = classes(trees[path]).get(name)
            made["methods"][name] = {part.name: method(part) for part in (node.body if node else [])
                                     if isinstance(part, ast.FunctionDef)}
    for path, wanted in FIELDS.items():
        for name, fields in wanted.items():
            node = classes(trees[path]).get(name)
            have = members(node) if node else set()
            made["fields"][name] = sorted(field for field in fields if field in have)
    for path, names in NAMES.items():
        made["names"][path] = sorted(name for name in names if name in top_names(trees[path]))
    return made


def flat(value, path=""):
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from flat(part, f"{path}{' ' if path else ''}{key}")
    else:
        yield path, json.dumps(value)


def difference(old, new):
    """A line for each thing that is not as it was."""
    old, new = dict(flat(old)), dict(flat(new))
    for path in sorted({*old, *new}):
        if old.get(path) != new.get(path):
            yield f"{path}: {old.get(path, 'not there')} -> {new.get(path, 'not there')}"


def command(usage, look, snapshot):
    """FOLDER [--write]: compare what look(FOLDER) finds with the snapshot, or write it anew."""
    if len(sys.argv) < 2:
        print(usage)
        return 2
    made = look(sys.argv[1])
    if "--write" in sys.argv:
        snapshot.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    lines = list(difference(json.loads(snapshot.read_text(encoding="utf-8")), made))
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(command(__doc__, read, SNAPSHOT))
