# SPDX-License-Identifier: Apache-2.0
"""The figures of each bench: names, units, limits and bars; and the statistics."""
import random
import statistics

NVME_DEPTHS = (1, 4, 16, 32)
NVME_QUEUE_DEPTH = 16

RESAMPLES = 4000
SEED = 1
# Why figures of a bench's other programs are missing; make_performance_doc.py knows them by it.
ONLY_SOME_RAN = "only (.+) were run"

WIDTH_MAX = 0.10  # an interval that reaches further from the median says nothing


class Figure:
    """One result. bar is for the ratio; without a limit it is for the value itself. is_bounded: the
    bar is for the upper end of the interval, as for a small difference of two large values, whose
    interval is wide beside it."""

    def __init__(self, name, unit, limit_name=None, bar=None, better="higher", note="",
                 worst_of=(), is_bounded=False):
        self.name = name
        self.unit = unit
        self.limit_name = limit_name
        self.bar = bar
        self.better = better
        self.note = note
        self.worst_of = worst_of
        self.is_bounded = is_bounded


LOCAL = [
    Figure("get_touch_vs_read", "GB/s", "reading private memory, one thread", 0.85,
           note="8 gets in flight, every byte read"),
    Figure("get_touch_one_vs_read", "GB/s", "reading private memory, one thread",
           note="one get at a time, every byte read"),
    Figure("put_vs_memcpy", "GB/s", "memcpy, one thread", 0.65,
           note="8 puts in flight, from the caller's buffer"),
    Figure("put_staged_vs_memcpy", "GB/s", "memcpy, one thread", 0.75,
           note="8 puts in flight, slots filled and sealed before"),
    Figure("put_filled_vs_memcpy", "GB/s", "memcpy, one thread",
           note="the same, sealing (checksum) included"),
    Figure("memcpy_two_threads", "GB/s", note="what the memory gives to two cores"),
    Figure("get_cpu_us", "us", bar=2.0, better="lower",
           note="CPU of client and daemon a block, a block a request, keys named before (as by "
                "a lookup), no byte read"),
    Figure("get_new_cpu_us", "us", better="lower",
           note="the same, 16,384 small blocks, keys not named lately"),
    Figure("get_chain_cpu_us", "us", better="lower",
           note="as get_cpu_us, 16 blocks a request"),
    Figure("get_p50_spin_vs_ring", "us", "round trip of two rings, spinning", 20.0, "lower",
           note="one get, both sides spinning"),
    Figure("get_p50_vs_wake", "us", "eventfd one way, a byte on a socket back", 2.5, "lower",
           note="one get, both sides asleep before"),
    Figure("redis_get", "GB/s", "redis-server, Unix socket, 8 gets in flight",
           note="gets in both, every byte read"),
]

REMOTE = [
    Figure("remote_vs_ucx_perftest", "GB/s", "ucx_perftest -t ucp_am_bw -e, 256 KiB", 0.85,
           note="blocks of 1 MiB, 64 gets in flight, TCP on loopback, summed on arrival"),
    Figure("remote_vs_ucx_perftest_tuned", "GB/s", "the same, with a daemon's buffers",
           note="the same; ucx_perftest with UCX_TCP_RX_SEG_SIZE, UCX_TCP_RCVBUF and "
                "UCX_TCP_SNDBUF as a daemon sets them"),
    Figure("remote_vs_sockets", "GB/s", "sockets alone, memory to memory, summed",
           note="the same; two processes that do with plain TCP what has to be done to the bytes"),
    Figure("remote_sockets_memory", "GB/s", "the same from and to a cached piece, not summed",
           note="plain TCP from memory of 256 MiB to memory of 256 MiB, summed: what it costs that "
                "blocks are not all the same 256 KiB, as those of ucx_perftest are"),
    Figure("remote_effective_bf16", "GB/s",
           note="bf16 K and V that these bytes are when encoded by profile balanced: the rate by "
                "the profile's ratio"),
    Figure("remote_cpu", "s/GB", better="lower",
           note="CPU of both daemons for the gets, system calls included"),
    Figure("remote_peer_mode_cost", "GB/s", "ucx_perftest without -e",
           note="ucx_perftest -e: what error handling (PEER) leaves of the rate"),
]

HOSTILE = [
    Figure("hostile_p99_vs_honest", "us", "beside a well-behaved neighbour", 1.5, "lower",
           note="an honest client's puts and gets of 64 KiB, beside a hostile neighbour"),
    Figure("hostile_p50_vs_honest", "us", "beside a well-behaved neighbour", better="lower",
           note="the same, the median"),
    Figure("hostile_cpu_vs_honest", "CPUs", "the well-behaved neighbour", better="lower",
           note="CPU of the hostile neighbour"),
    Figure("hostile_daemon_cpu_vs_honest", "CPUs", "beside a well-behaved neighbour",
           better="lower", note="CPU of the daemon beside a hostile neighbour"),
    Figure("hostile_attacks", "1/s", note="attacks a second"),
]

ACCURACY = [
    Figure(name, "nats", bar=bar, better="lower", is_bounded=True,
           note=f"delta NLL a token of mha-28m, {what}: not evidence for your model")
    for name, bar, what in (("mha_saw4_dnll", 0.004, "balanced"),
                            ("mha_saw3_dnll", 0.013, "saw3-search"),
                            ("mha_tq2_dnll", 0.055, "tq2-centred"),
                            ("mha_tq2_pre_dnll", None, "tq2-centred, K before RoPE"))
] + [
    Figure(name, "nats", bar=bar, better="lower", is_bounded=True,
           note=f"delta NLL a token, X stored instead of K and V, {what}: not evidence for your "
                "model")
    for name, bar, what in (("mha_xcl3_dnll", 0.002, "mha-28m, differences at 3 bits"),
                            ("mha_xcl2_dnll", 0.011, "mha-28m, differences at 2 bits"),
                            ("gqa_xgcl3_dnll", 0.006, "gqa-26m, joint latents at 3 bits"),
                            ("gqa_xgcl2_dnll", 0.025, "gqa-26m, joint latents at 2 bits"))
] + [
    Figure(f"order_{name}", "nats", better="lower", is_bounded=True,
           note="an order of the article on XQuant")
    for name in ("x4_kivi2", "x4_tq2", "xcl4_x4", "xcl3_x3", "xcl2_x2", "xcl2_x3", "xcl3_saw4",
                 "xg4_kivi4", "xg2_kivi2", "xgcl3_xg3", "xgcl2_xg2", "xgcl3_kv3", "xgcl2_kv2")
] + [
    Figure(f"{name}_calibrated_dnll", "nats", bar=bar, better="lower", is_bounded=True,
           note="delta NLL a token with the profile that calibrate made")
    for name, bar in (("mha", 0.01), ("smollm2", 0.01), ("qwen", 0.02))
] + [
    Figure(f"{name}_calibrated_ratio", "", bar=2.5, note="bf16 K and V over whole records")
    for name in ("mha", "smollm2")
] + [
    Figure(f"gauss_{name}_cos", "", bar=bar, note=f"cosine with Gaussian vectors, d = 128{more}")
    for name, bar, more in (("saw4", 0.995, ""), ("tq4", 0.995, ""), ("tq3", 0.982, ""),
                            ("tq2", 0.939, ""), ("tq4_qjl", None, "; an article: .9749"),
                            ("tq3_qjl", None, "; an article: .9225"),
                            ("tq2_qjl", None, "; an article: .8031"))
] + [
    Figure("saw4_ratio_d128", "", bar=3.76, note="saw4-paper, bytes of bf16 over the payload's"),
    Figure("saw4_block_ratio_d128", "",
           note="the same over whole records, of one layer of 4 heads"),
] + [
    Figure(f"gauss_{name}_d_off", "", bar=0.02, better="lower", is_bounded=True,
           note=f"how far the distortion is from {what}, the worst of dims 64, 80, 96, 128, 256")
    for name, what in (("tq", "theory's, 4 to 2 bits as published"),
                       ("saw", "exact codes over the whole range, 8 to 2 bits"),
                       ("saw_clip", "exact codes over the fixed share, 4 to 2 bits"))
] + [
    Figure(f"gauss_tq{bits}_qjl_off", "", bar=0.005, better="lower", is_bounded=True,
           note=f"how far the cosine, by powers, is from theory's {theory}")
    for bits, theory in ((4, ".975"), (3, ".921"), (2, ".798"))
] + [
    Figure("outlier_kurtosis", "", bar=100, note="2 of 128 channels 40 times as large"),
    Figure("outlier_kurtosis_off", "", bar=0.5, better="lower", is_bounded=True,
           note="the same behind signs and a Hadamard step, how far from 3"),
    Figure("outlier_saw4_vs_naive4", "",
           note="squared error of naive4 over balanced's, in channels that are no outliers"),
    Figure("needle_saw4", "", bar=0.95,
           note="balanced: needles found, the worst of 1k, 4k, 16k keys"),
    Figure("needle_tq4", "", bar=0.95, note="tq4: the same"),
    Figure("needle_saw3_vs_article", "", bar=1.0,
           note="saw3-search: needles found over an article's .90, .80, .65 of 1k, 4k, 16k keys"),
    Figure("needle_tq3_vs_article", "", bar=1.0, note="tq3: the same"),
    Figure("needle_naive4", "", note="naive4: needles found, the worst of 1k, 4k, 16k keys"),
    Figure("needle_tq3_qjl", "", note="tq3-qjl: the same"),
]

CODEC_CASES = (
    ("saw4", "balanced, d = 128, 32 layers"),
    ("saw4_paper", "saw4-paper, d = 128"),
    ("safe", "safe (K 8, V 4 bits), d = 128"),
    ("saw8", "saw8, d = 128"),
    ("saw6", "saw6, d = 128"),
    ("saw5", "saw5, d = 128"),
    ("saw3", "saw3, d = 128"),
    ("saw2", "saw2, d = 128"),
    ("saw4_search9", "saw4-search9, d = 128"),
    ("saw3_search", "saw3-search, d = 128"),
    ("saw2_search", "saw2-search, d = 128"),
    ("tq4", "tq4, d = 128"),
    ("tq3", "tq3, d = 128"),
    ("tq2", "tq2, d = 128"),
    ("tq3p5", "tq3.5, d = 128"),
    ("kivi4", "kivi4-g32, d = 128"),
    ("kivi2", "kivi2-g32, d = 128"),
    ("exact", "exact, d = 128"),
    ("raw", "raw, d = 128"),
    ("saw4_d64", "balanced, d = 64"),
    ("saw4_d80", "balanced, d = 80"),
    ("saw4_d96", "balanced, d = 96"),
    ("saw4_d112", "balanced, d = 112"),
    ("saw4_d256", "balanced, d = 256"),
)
# Packing of records for drives: cases, and what is saved of real K and V.
ENTROPY_CASES = ("saw4", "saw3", "tq4", "kivi4", "exact", "raw")
ENTROPY_SAVINGS = (("", "balanced", 6.0), ("_saw8", "saw8", None), ("_saw3", "saw3", None),
                   ("_saw2", "saw2", None), ("_tq4", "tq4", None), ("_tq3", "tq3", None),
                   ("_kivi4", "kivi4-g32", None), ("_kivi2", "kivi2-g32", None),
                   ("_exact", "exact", None), ("_raw", "raw", None))
CODEC_BARS = {"saw4_encode": 0.35, "saw4_decode": 0.40}


def codec_figures():
    result = []
    for name, note in CODEC_CASES:
        for direction in ("encode", "decode"):
            result.append(Figure(f"{name}_{direction}_vs_memcpy", "GB/s", "memcpy, one thread",
                                 CODEC_BARS.get(f"{name}_{direction}"), note=note))
    for name in ENTROPY_CASES:
        for direction in ("encode", "decode"):
            result.append(Figure(f"{name}_entropy_{direction}_vs_memcpy", "GB/s",
                                 "memcpy, one thread",
                                 note=f"{dict(CODEC_CASES)[name]}: records packed for a drive, "
                                      "bytes of plain records"))
    for name, profile, bar in ENTROPY_SAVINGS:
        result.append(Figure(f"entropy_saving{name}", "%", bar=bar,
                             note=f"of records of real K and V by {profile}, the lesser of "
                                  "SmolLM2-135M and Qwen2.5-Coder-0.5B"))
    result.append(Figure("crc32c_vs_read", "GB/s", "reading, one thread"))
    result.append(Figure("crc32c_copy_vs_memcpy", "GB/s", "memcpy, one thread",
                         note="copy and checksum in one pass"))
    return result


def x_figures():
    return [Figure(f"x_rebuild{what}_{n}", "GFLOP/s", f"{products} of the BLAS, fp32, one thread",
                   note=f"{n} tokens of a layer, {note}")
            for what, products, note in (
                ("", "the product", "2,048 elements of X, 16 K/V heads of 128: K and V, rotated"),
                ("_latent", "both products", "2,048 elements of X, 4 K/V heads of 128, latents of "
                                             "1,024: sums, K and V, rotated"))
            for n in (64, 256, 1024)]


def nvme_figures():
    result = []
    for kind, bar in (("read", 0.90), ("write", 0.85)):
        what = "random reads" if kind == "read" else "appends"
        speeds = [Figure(f"{kind}_vs_fio_d{depth}", "GB/s", f"fio, depth {depth}", bar,
                         note=f"{what} of 1 MiB, {depth} in flight") for depth in NVME_DEPTHS]
        cpus = [Figure(f"{kind}_cpu_vs_fio_d{depth}", "s/GiB", f"fio, depth {depth}", 1.3, "lower",
                       note=f"CPU without checksums, {depth} in flight") for depth in NVME_DEPTHS]
        result.append(Figure(f"{kind}_vs_fio", "GB/s", "fio", bar, note="the worst depth",
                             worst_of=[figure.name for figure in speeds]))
        result += speeds
        result.append(Figure(f"{kind}_cpu_vs_fio", "s/GiB", "fio", 1.3, "lower",
                             note="the worst depth", worst_of=[figure.name for figure in cpus]))
        result += cpus
    # what is appended brings its checksum along
    result += [Figure(f"read_crc_cpu_d{depth}", "s/GiB", better="lower", note="CPU of checksums")
               for depth in NVME_DEPTHS]
    depth = NVME_QUEUE_DEPTH
    result.append(Figure(f"queue_read_vs_fio_d{depth}", "GB/s", f"fio, depth {depth}",
                         note="the I/O queue without the tier"))
    result.append(Figure(f"queue_read_cpu_vs_fio_d{depth}", "s/GiB", f"fio, depth {depth}",
                         better="lower", note="the I/O queue without the tier"))
    return result


GPU_KERNELS = [
    Figure("saw4_encode_contig_vs_copy", "GB/s", "device copy, read + written", 0.92,
           note="balanced, one page a chunk, bytes read + written"),
    Figure("saw4_encode_paged_vs_copy", "GB/s", "device copy, read + written", 0.88,
           note="balanced, pages of 16 tokens, (B, H, N, 2D)"),
    Figure("saw4_decode_contig_vs_copy", "GB/s", "device copy, read + written", 0.90,
           note="balanced, one page a chunk"),
    Figure("saw4_decode_paged_vs_copy", "GB/s", "device copy, read + written", 0.85,
           note="balanced, pages of 16 tokens"),
    Figure("encode_traffic_vs_copy", "GB/s", "device copy, read + written",
           note="a kernel with the encoder's traffic and no maths, pages of 16 tokens"),
    Figure("decode_traffic_vs_copy", "GB/s", "device copy, read + written",
           note="a kernel with the decoder's traffic and no maths, pages of 16 tokens"),
    Figure("fill_vs_copy", "GB/s", "device copy, read + written",
           note="cuMemsetD8Async: what writing alone reaches"),
    Figure("rotation_cost", "ms", "the same kernel without rotation", 1.10, "lower",
           note="time of a burst's encode"),
] + [
    Figure(f"{profile}_{way}_vs_copy", "GB/s", "device copy, read + written", 0.50,
           note=f"{profile}, pages of 16 tokens")
    for profile in ("saw8", "safe", "saw6", "saw5", "saw3", "saw2", "saw3_search", "saw2_search",
                    "tq4", "tq3", "tq2", "tq3_split", "tq2_split", "kivi4", "kivi4_g128", "kivi2")
    for way in ("encode", "decode")
] + [
    Figure(f"{profile}_{way}_vs_copy", "GB/s", "device copy, read + written", bar,
           note=f"X of 32 layers of 2,048 elements as {profile}, pages of 16 tokens"
                + (", nine ratios tried" if way == "encode" else ""))
    for profile, bar in (("x3", None), ("xcl3", 0.50), ("xcl2", 0.50))
    for way in ("encode", "decode")
]

GPU_LOOPS = (
    ("gemm4096", "bf16 products of 4096", "gemm"),
    ("gemm8192", "bf16 products of 8192", "gemm"),
    ("membound", "a kernel that reads 4 GiB", "membound"),
    ("prefill", "products of a prefill and passes over memory", None),
)
GPU_RATES = (5, 20, 100)
GPU_MODELS = (("", "Llama-3.1-8B"), ("_mla", "DeepSeek MLA"))


def gpu_link_figures():
    result = []
    for suffix, model in GPU_MODELS:
        pages = f"{model}, pages of 16 tokens"
        bar = 0.95 if suffix == "" else None
        for kind, copy in (("offload", "D2H"), ("onload", "H2D")):
            to = f"pinned {copy} times ratio"
            result.append(Figure(f"{kind}_vs_ideal{suffix}", "GB/s", to, bar, note=pages))
            result.append(Figure(f"{kind}_vs_page_copies{suffix}", "GB/s", "a copy a page, uncoded",
                                 note=pages))
            result.append(Figure(f"{kind}_vs_batch{suffix}", "GB/s",
                                 "the same copies by one cuMemcpyBatchAsync", note=pages))
            result.append(Figure(f"{kind}_vs_gather{suffix}", "GB/s",
                                 "a kernel that moves pages to or from host memory, uncoded",
                                 note=pages))
        result.append(Figure(f"onload_first_layer_us{suffix}", "us", better="lower",
                             note=f"{pages}: until the first layer of a chunk is in its pages"))
    return result


def gpu_calls_figures():
    what = "8,192 tokens of Llama-3.1-8B by the library and a daemon"
    result = []
    for suffix, workers in (("", "the default"), ("_8", "8")):
        result.append(Figure(f"put_stored{suffix}_vs_ideal", "GB/s", "pinned D2H times ratio",
                             note=f"{what}, until a get finds them; {workers} workers"))
        result.append(Figure(f"put_stored{suffix}_cpus", "CPUs", better="lower",
                             note=f"client and daemon meanwhile; {workers} workers"))
    result.append(Figure("get_pages_vs_ideal", "GB/s", "pinned H2D times ratio",
                         note=f"{what}, out of the arena, which is pinned"))
    result.append(Figure("hbm_hit_vs_copy", "GB/s", "device copy of as many bytes in all", 0.85,
                         note=f"{what}, where they lie in the daemon's share of the GPU's memory"))
    result.append(Figure("get_window_vs_ideal", "GB/s", "pinned H2D times ratio",
                         note=f"{what}, by a pinned window, into which the client copies"))
    return result


def gpu_stolen_figures():
    result = []
    for loop, what, kind in GPU_LOOPS:
        result.append(Figure(f"control_{loop}", "ms", "GiB", better="lower", is_bounded=True,
                             note=f"ms/GiB; {what} twice, nothing moved"))
        for direction in ("offload", "onload"):
            for rate in GPU_RATES:
                result.append(Figure(f"stolen_{loop}_{direction}_{rate}", "ms", "GiB moved",
                                     0.8 if kind else None, "lower", is_bounded=True,
                                     note=f"ms/GiB; {direction} at {rate} GB/s beside {what}"))
                result.append(Figure(f"slowdown_{loop}_{direction}_{rate}", "ms", "ms without",
                                     1.005 if rate == 5 else None, "lower", is_bounded=True,
                                     note=f"a window of {what}, {direction} at {rate} GB/s"))
    for kind in ("gemm", "membound"):
        parts = [f"stolen_{loop}_{direction}_{rate}" for loop, _, of in GPU_LOOPS if of == kind
                 for direction in ("offload", "onload") for rate in GPU_RATES]
        result.append(Figure(f"stolen_{kind}_ms_per_gib", "ms", "GiB moved", 0.8, "lower",
                             note="the worst of its loops, directions and rates", worst_of=parts))
    result.append(Figure("slowdown_at_5gbps", "ms", "ms without", 1.005, "lower",
                         note="the worst loop and direction",
                         worst_of=[f"slowdown_{loop}_{direction}_5" for loop, _, _ in GPU_LOOPS
                                   for direction in ("offload", "onload")]))
    return result


def gpu_agent_figures():
    """The whole way of puts and gets, by either path; _mps: with the control daemon of MPS
    running."""
    result = []
    rows = [("puts", "rate", "encoded", rate) for rate in GPU_RATES]
    rows.append(("gets", "get_rate", "decoded", 20))
    for suffix, how in (("", "without MPS"), ("_mps", "under MPS")):
        for loop, what, _ in GPU_LOOPS:
            for path in ("engine", "agent"):
                for calls, truth, done, rate in rows:
                    tail = f"{loop}_{path}_{rate}{suffix}"
                    note = f"{calls} at {rate} GB/s beside {what}, path {path.upper()}, {how}"
                    result.append(Figure(f"{calls}_{tail}", "ms", f"GiB {done}", better="lower",
                                         is_bounded=True, note=f"ms/GiB; {note}"))
                    result.append(Figure(f"{truth}_{tail}", "GB/s", note=f"in truth; {note}"))
    return result


def gpu_x_figures():
    what = "4,096 tokens of Llama-2-7B"
    result = [
        Figure("x4_fetch_vs_fp16_kv", "ms", "pinned H2D of their fp16 K and V", 0.5, "lower",
               note=f"{what}, X at 4 bits: fetched, decoded, K and V rebuilt in pages"),
        Figure("x3_fetch_vs_fp16_kv", "ms", "pinned H2D of their fp16 K and V", better="lower",
               note=f"{what}, X at 3 bits: the same"),
    ]
    for name, limit, note in (
            ("part_copy", "pinned H2D of their fp16 K and V", "their X from pinned memory, alone"),
            ("part_decode", "D2D copy of as many bytes", "decoding it, alone"),
            ("part_products", "cuBLAS, bf16, 4,096 rows", "products of 1,024 rows, alone"),
            ("part_pages", "D2D copy of as many bytes", "rotation, K and V into pages, alone"),
            ("encode", "D2D copy of as many bytes", "encoding their X")):
        result.append(Figure(f"x4_{name}", "ms", limit, better="lower", note=f"{what}: {note}"))
    what_8b = "4,096 tokens of Llama-3.1-8B, latents of differences of X at 3 bits"
    for name, unit, note in (("fetch", "ms", "fetched, K and V rebuilt in pages"),
                             ("gpu", "ms", "kernels alone"),
                             ("bytes", "KiB", "of a token")):
        result.append(Figure(f"xgcl3_{name}_vs_saw4", unit, "K and V at 4 bits", better="lower",
                             note=f"{what_8b}: {note}"))
    result.append(Figure("xgcl3_hook_vs_products", "ms", "the engine's products of K and V",
                         better="lower", note=f"{what_8b}: made and encoded at the hook"))
    for n in (256, 1024, 4096, 16384):
        bar = 0.80 if n == 4096 else None
        result.append(Figure(f"remat_gemm_{n}", "TFLOP/s", "cuBLAS, bf16, same shape", bar,
                             note=f"{n} tokens of a layer of Llama-2-7B by [W_K | W_V]"))
        if n <= 4096:
            result.append(Figure(f"remat_layer_{n}", "TFLOP/s", "cuBLAS, bf16, same shape",
                                 note=f"{n} tokens: the product, rotation, K and V into pages"))
    result.append(Figure("remat_gemm_vs_peak", "TFLOP/s", "cuBLAS, bf16, same shape", 0.80,
                         note="4,096 tokens", worst_of=["remat_gemm_4096"]))
    return result


ENGINE_OTHERS = {
    "copy": "memcpy by one thread",
    "valkey": "Valkey or Redis, Unix socket",
    "mooncake": "Mooncake store, TCP",
    "lmcache_server": "LMCache's server, shared memory",
}
# With many blocks in flight, and with one: unit, which is better, what it is.
ENGINE_TAILS = {
    True: {"": ("GB/s", "higher", "8 in flight"),
           "_cpu": ("s/GB", "lower", "CPU of the client and the store, 8 in flight")},
    False: {"_p50": ("us", "lower", "one in flight, median"),
            "_p99": ("us", "lower", "one in flight, 99 of 100")},
}


def engine_figures():
    result = [
        Figure("nohit_cost", "s", "the same prompts without kvferry", 1.01, "lower",
               is_bounded=True, note="a prompt of 256 tokens, one layer of Llama-3.1-8B on one "
                                     "core: looked up (a miss), computed, its KV put"),
        Figure("nohit_calls", "%", better="lower",
               note="of such a loop's time, in calls of the library"),
        Figure("nohit_cost_vllm", "s", "the same vLLM without kvferry", 1.01, "lower",
               is_bounded=True, note="a prompt of 1,024 tokens of a real vLLM: looked up (a miss), "
                                     "computed, its KV put"),
        Figure("nohit_calls_vllm", "%", better="lower",
               note="of such a loop's time, in the connector's methods"),
    ]
    for label, size in (("1m", "1 MiB"), ("8m", "8 MiB")):
        for what, where in (("get", "into the caller's buffer, read there once"),
                            ("put", "from the caller's buffer")):
            for other, limit in ENGINE_OTHERS.items():
                for tails in ENGINE_TAILS.values():
                    for tail, (unit, better, note) in tails.items():
                        result.append(Figure(f"{what}_{label}{tail}_vs_{other}", unit, limit,
                                             better=better,
                                             note=f"{what} of {size} {where}; {note}"))
    return result


def replay_figures():
    arena = "arena of 10,000 raw blocks of 512 tokens, no drive"
    result = [Figure(f"replay_{profile}_hit", "of blocks", "a store that forgets nothing",
                     note=f"{profile}, {arena}")
              for profile in ("raw", "balanced", "dense", "max")]
    store = "2,500 blocks in memory, 40,000 on the drive"
    result.append(Figure("replay_free_writes", "of blocks",
                         note=f"written where there is no budget; {store}"))
    for budget in ("0.1", "0.2", "0.4"):
        for name, rule in (("auto", "second sight below half a budget, else all"),
                           ("all", "all while there is budget"), ("second", "at second sight")):
            result.append(Figure(f"replay_{name}_{budget}", "of blocks", "no write budget",
                                 note=f"hit, {rule}; budget of {budget} of the blocks looked up"))
            result.append(Figure(f"replay_{name}_{budget}_writes", "of blocks",
                                 note="written, the same"))
    return result


FIGURES = {"local": LOCAL, "remote": REMOTE, "codec": codec_figures(), "x": x_figures(),
           "nvme": nvme_figures(),
           "gpu": (GPU_KERNELS + gpu_link_figures() + gpu_calls_figures() +
                   gpu_stolen_figures() + gpu_agent_figures() + gpu_x_figures()),
           "hostile": HOSTILE, "engines": engine_figures(), "replay": replay_figures(),
           "accuracy": ACCURACY}


def fio_names():
    return [figure.name for figure in FIGURES["nvme"] if figure.limit_name]


# --- statistics ----------------------------------------------------------------------------------

def interval(values):
    """Bootstrap 95 % interval of the median, from a fixed seed."""
    generator = random.Random(SEED)
    n = len(values)
    medians = sorted(statistics.median(generator.choices(values, k=n)) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def verdict(median, low, high, bar, better, is_bounded=False):
    """True, False, "inconclusive", or None without a bar."""
    if is_bounded:
        return None if bar is None else high <= bar
    if median <= 0 or max(high - median, median - low) > WIDTH_MAX * median:
        return "inconclusive"
    if bar is None:
        return None
    return median >= bar if better == "higher" else median <= bar


def measured(figure, samples):
    """The result of a figure that was measured."""
    pairs = samples.pairs.get(figure.name)
    values = samples.values.get(figure.name)
    result = {"name": figure.name, "unit": figure.unit, "note": figure.note}
    if pairs:
        judged = [ours / limit for ours, limit in pairs if limit > 0]
        if not judged:
            return {**result, "skipped": "the limit was too short to be measured"}
        result.update(value=statistics.median(ours for ours, _ in pairs),
                      limit_name=figure.limit_name,
                      limit=statistics.median(limit for _, limit in pairs),
                      ratio=statistics.median(judged))
    else:
        judged = values
        result.update(value=statistics.median(values), limit_name=None, limit=None, ratio=None)
    low, high = interval(judged)
    result.update(ci=[low, high], pairs=len(judged), bar=figure.bar, better=figure.better)
    result["pass"] = verdict(statistics.median(judged), low, high, figure.bar, figure.better,
                             figure.is_bounded)
    return rounded(result)


def rounded(value):
    """Six digits are more than is known."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return value


def worst(figure, by_name):
    """The result with the worst ratio, under another name."""
    parts = [by_name[name] for name in figure.worst_of]
    skipped = [part for part in parts if "skipped" in part]
    if skipped:
        return {"name": figure.name, "unit": figure.unit, "note": figure.note,
                "skipped": skipped[0]["skipped"]}
    chosen = (min if figure.better == "higher" else max)(parts, key=lambda part: part["ratio"])
    return {**chosen, "name": figure.name, "note": figure.note}


def results(bench, samples, is_quick):
    """Every figure of a bench, in order; what was measured without being in the table is an
    error."""
    table = FIGURES[bench]
    strangers = (set(samples.pairs) | set(samples.values)) - {figure.name for figure in table}
    if strangers:
        raise ValueError(f"not in the table of {bench}: {', '.join(sorted(strangers))}")
    by_name = {}
    for figure in table:
        if figure.worst_of:
            continue
        if figure.name in samples.pairs or figure.name in samples.values:
            by_name[figure.name] = measured(figure, samples)
        else:
            by_name[figure.name] = {"name": figure.name, "unit": figure.unit, "note": figure.note,
                                    "skipped": samples.skipped.get(figure.name, "not measured")}
    for figure in table:
        if figure.worst_of:
            by_name[figure.name] = worst(figure, by_name)
    ordered = [by_name[figure.name] for figure in table]
    for result in ordered:
        if is_quick and "pass" in result:
            result["pass"] = "inconclusive"
    return ordered


# --- for people ----------------------------------------------------------------------------------

VERDICTS = {True: "pass", False: "FAIL", "inconclusive": "inconclusive", None: ""}


def number(value):
    return "" if value is None else f"{value:.3g}"


def bar_text(result):
    if result.get("bar") is None:
        return ""
    return f"{'>=' if result['better'] == 'higher' else '<='} {result['bar']:g}"


def rows(report):
    """Cells of the table: name, value, limit, ratio, interval, bar, verdict, note."""
    for result in report["results"]:
        if "skipped" in result:
            yield (result["name"], "", "", "", "", "", "skipped", result["skipped"])
            continue
        low, high = result["ci"]
        yield (result["name"], f"{number(result['value'])} {result['unit']}",
               number(result["limit"]), number(result["ratio"]),
               f"{number(low)}..{number(high)}", bar_text(result), VERDICTS[result["pass"]],
               result["note"])


def table(report):
    head = ("", "value", "limit", "ratio", "95 %", "bar", "", "")
    lines = [head, *rows(report)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
            for line in lines]
    if report["quick"]:
        text.append("quick: this run only shows that the script works")
    return "\n".join(text)
