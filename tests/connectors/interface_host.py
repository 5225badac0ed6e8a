#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""As interface.py, of what the connectors for host memory take of their engines.

usage: interface_host.py sglang|tier FOLDER            compare sglang_interface.json, or
                                                       tier_interface.json (vLLM's secondary
                                                       tiers), to the package in FOLDER; exit 1 and
                                                       a line each if it differs
       interface_host.py sglang|tier FOLDER --write    make the file anew
"""
import ast
import sys
from pathlib import Path

import interface

HERE = Path(__file__).resolve().parent
CACHE = "sglang/srt/mem_cache/"
OFFLOAD = "vllm/v1/kv_offload/"
CONNECTORS = "vllm/distributed/kv_transfer/kv_connector/v1/"
SGLANG = {
    "METHODS": {CACHE + "hicache_storage.py": ["HiCacheStorage"]},
    "FIELDS": {
        CACHE + "hicache_storage.py": {
            "HiCacheStorageConfig": ["tp_rank", "tp_size", "pp_size", "attn_cp_size", "dcp_size",
                                     "is_mla_model", "extra_config"],
            "HiCacheStorageExtraInfo": ["prefix_keys"],
            "PoolTransfer": ["name", "host_indices", "keys", "hit_policy"],
            "PoolTransferResult": ["kv_hit_pages", "extra_pool_hit_pages",
                                   "restorable_prefix_pages"],
            "PoolName": ["KV", "SWA", "MAMBA", "INDEXER"],
            "PoolHitPolicy": ["ALL_PAGES", "TRAILING_PAGES", "BLOCK_GROUPS"]},
        CACHE + "pool_host/base.py": {
            "HostKVCache": ["page_size", "layout", "dtype", "storage_format_tag",
                            "stores_page_envelope", "get_data_page", "get_dummy_flat_data_page",
                            "set_from_flat_data_page"]},
        CACHE + "pool_host/mha.py": {
            "MHATokenToKVPoolHost": ["layer_num", "target_layer_num", "head_num", "head_dim",
                                     "v_head_dim", "k_buffer", "v_buffer"]},
        CACHE + "pool_host/mla.py": {
            "MLATokenToKVPoolHost": ["layer_num", "target_layer_num", "kv_lora_rank",
                                     "qk_rope_head_dim", "kv_cache_dim"]},
        "sglang/srt/managers/cache_controller.py": {
            "HiCacheController": ["_page_get_zero_copy", "_page_set_zero_copy"]}},
    "NAMES": {CACHE + "utils.py": ["storage_namespace_seed", "get_storage_hash_str"],
              "sglang/srt/runtime_context.py": ["get_server_args"],
              "sglang/srt/arg_groups/overrides.py": ["resolution_result"]}}
TIER = {
    "METHODS": {OFFLOAD + "tiering/base.py": ["SecondaryTierManager"]},
    "FIELDS": {
        "vllm/config/vllm.py": {
            "VllmConfig": ["model_config", "speculative_config", "lora_config"]},
        "vllm/config/speculative.py": {"SpeculativeConfig": ["draft_model_config"]},
        "vllm/config/model.py": {
            "ModelConfig": ["model", "dtype", "hf_overrides", "hf_config_path", "revision",
                            "quantization", "quantization_config", "max_model_len"]},
        OFFLOAD + "tiering/base.py": {
            "TransferJob": ["job_id", "keys", "chunk_ids", "req_context"],
            "JobResult": ["job_id", "success", "successful_keys", "transfer_time",
                          "transfer_bytes"]},
        OFFLOAD + "base.py": {
            "ReqContext": ["req_id", "kv_transfer_params", "get_offload_key_position"],
            "LookupResult": ["MISS", "HIT", "RETRY"]},
        OFFLOAD + "config.py": {
            "OffloadingGroupConfig": ["tokens_per_block", "layer_names", "group_id"],
            "OffloadingModelConfig": ["name", "dtype"],
            "OffloadingCacheConfig": ["tokens_per_hash", "blocks_per_chunk"],
            "OffloadingParallelConfig": ["tp_size", "pp_size", "pcp_size", "dcp_size",
                                         "world_size"],
            "OffloadingConfig": ["groups", "worker_kv_bytes_per_block", "model", "cache",
                                 "parallel", "replicated_layout", "canonical_layout",
                                 "kv_cache_layout"]}},
    "NAMES": {OFFLOAD + "base.py": ["RequestOffloadingContext", "make_offload_key"],
              CONNECTORS + "offloading_connector.py": ["OffloadingConnector"]}}
ENGINES = {"sglang": SGLANG, "tier": TIER}


def choose(engine):
    """Have interface.py look at an engine's connector."""
    interface.METHODS = ENGINES[engine]["METHODS"]
    interface.FIELDS = ENGINES[engine]["FIELDS"]
    interface.NAMES = ENGINES[engine]["NAMES"]
    interface.SNAPSHOT = HERE / f"{engine}_interface.json"


def members(node, found=interface.members):
    """Members of an enumeration are names that a value is given to."""
    names = {ast.unparse(target) for part in node.body if isinstance(part, ast.Assign)
             for target in part.targets}
    return found(node) | names


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in ENGINES:
        print(__doc__)
        return 2
    choose(sys.argv.pop(1))
    interface.members = members
    return interface.command(__doc__, interface.read, interface.SNAPSHOT)


if __name__ == "__main__":
    sys.exit(main())
