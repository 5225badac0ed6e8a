#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""X of a Hugging Face model in place of its K and V: captured by hooks, put, fetched, rebuilt, and
the text continued from it, beside the model's own continuation.

    04_x_cache.py MODEL [--profile NAME] [--svd FILE] [--prompt TEXT] [--new N]

MODEL is a folder with config.json and safetensors, of the family Llama, Qwen2 or Qwen3, that has a
tokenizer or is given one by --tokenizer. A daemon is running ($KVFERRY_SOCKET, or --socket). Where
X is larger than K and V (few K/V heads), --svd names what `kvferry svd MODEL --write FILE` wrote,
and the library stores latents of X: of differences from layer to layer with the profiles xgcl*,
else each layer by itself. Needs torch, transformers, libkvferry and OpenBLAS. Exits with 1 if the
profile is without loss and the continuations differ.
"""
import argparse
import ctypes as c
import hashlib
import os
import sys
import time

import torch
import transformers

KIND_X, KIND_XG, DTYPE_F32, ROPE_HALF = 4, 5, 3, 1
ALLOW_UNCALIBRATED = 1
CHUNK_TOKENS = 64

# --- kvferry.h ------------------------------------------------------------------------------------

u8, u16, u32, u64, ptr = c.c_uint8, c.c_uint16, c.c_uint32, c.c_uint64, c.c_void_p


class Key(c.Structure):
    _fields_ = [("data", ptr), ("bytes", c.c_size_t)]


class Geometry(c.Structure):
    _fields_ = [("struct_bytes", u32), ("kind", u8), ("dtype", u8), ("rope_state", u8),
                ("layout_tag", u8), ("n_layers", u16), ("n_heads", u16), ("dim_k", u16),
                ("dim_v", u16), ("chunk_tokens", u16), ("sink_tokens", u16)]


class TensorView(c.Structure):
    _fields_ = [("layers", c.POINTER(ptr)), ("page_stride_bytes", c.c_size_t),
                ("token_stride_bytes", c.c_size_t), ("head_stride_bytes", c.c_size_t)]


class KvView(c.Structure):
    _fields_ = [("struct_bytes", u32), ("tokens_a_page", u32), ("page_table", ptr),
                ("k", TensorView), ("v", TensorView)]


LogFn = c.CFUNCTYPE(None, ptr, c.c_int, c.c_char_p)


class Options(c.Structure):
    _fields_ = [("struct_bytes", u32), ("flags", u32), ("socket_path", c.c_char_p),
                ("client_name", c.c_char_p), ("profile", c.c_char_p),
                ("geometry", c.POINTER(Geometry)), ("weights_digest", u8 * 32),
                ("adapter_digest", u8 * 32), ("namespace_label", c.c_char_p), ("shard", u16),
                ("shard_count", u16), ("ring_entries", u32), ("staging_bytes", u64),
                ("connect_timeout_ms", u32), ("reserved", u32), ("log", LogFn), ("log_arg", ptr),
                ("factors_digest", u8 * 32)]


class Info(c.Structure):
    _fields_ = [("struct_bytes", u32), ("protocol_version", u16), ("connected", u8),
                ("lossless", u8), ("profile", c.c_char * 16), ("rest", u8 * 312)]


class Hit(c.Structure):
    _fields_ = [("status", c.c_int32), ("tier", u8), ("reserved", u8 * 3), ("record", ptr),
                ("record_bytes", u64), ("payload", ptr), ("payload_bytes", u64), ("lease", u64)]


class XWeights(c.Structure):
    _fields_ = [("struct_bytes", u32), ("d_model", u32), ("stored_width", u32), ("n_layers", u16),
                ("n_heads", u16), ("model_heads", u16), ("dim_k", u16), ("dim_v", u16),
                ("rope_dims", u16), ("dtype", u8), ("kv_dtype", u8), ("rope_style", u8),
                ("reserved", u8), ("rope_positions", u32), ("k_norm_eps", c.c_float),
                ("w_k", c.POINTER(ptr)), ("w_v", c.POINTER(ptr)), ("b_k", c.POINTER(ptr)),
                ("b_v", c.POINTER(ptr)), ("k_norm", c.POINTER(ptr)), ("rope_cos", ptr),
                ("rope_sin", ptr), ("weights_digest", u8 * 32), ("adapter_digest", u8 * 32),
                ("log", LogFn), ("log_arg", ptr), ("svd_file", c.c_char_p)]


class XInput(c.Structure):
    _fields_ = [("struct_bytes", u32), ("n_tokens", u32), ("position_first", u32), ("dtype", u8),
                ("reserved", u8 * 3), ("positions", ptr), ("data", ptr),
                ("token_stride_bytes", c.c_size_t), ("sums", ptr)]


class XPutOptions(c.Structure):
    _fields_ = [("struct_bytes", u32), ("token_start", u32), ("n_tokens", u32), ("reserved", u32),
                ("memory_bytes", u64), ("x", ptr)]


class XFactors(c.Structure):
    _fields_ = [("struct_bytes", u32), ("d_model", u32), ("rank", u32), ("n_layers", u16),
                ("n_heads", u16), ("dim_k", u16), ("dim_v", u16), ("weights_digest", u8 * 32),
                ("digest", u8 * 32)]


class XGateOptions(c.Structure):
    _fields_ = [("struct_bytes", u32), ("query_heads", u32), ("ffn_width", u32),
                ("margin_percent", u32), ("x_profile", c.c_char_p), ("kv_profile", c.c_char_p),
                ("link_bytes_per_s", c.c_double), ("flop_per_s", c.c_double),
                ("recompute_flop_per_s", c.c_double), ("fixed_s", c.c_double), ("log", LogFn),
                ("log_arg", ptr)]


class XChoice(c.Structure):
    _fields_ = [("struct_bytes", u32), ("way", u8), ("reserved", u8 * 3),
                ("seconds", c.c_double * 3), ("choices", u64 * 3),
                ("link_bytes_per_s", c.c_double), ("flop_per_s", c.c_double),
                ("why", c.c_char * 192)]


def new(kind, **fields):
    """A struct of the library that knows its size."""
    return kind(struct_bytes=c.sizeof(kind), **fields)


def pointers(tensors):
    return (ptr * len(tensors))(*(t.data_ptr() for t in tensors))


@LogFn
def log(_arg, _severity, text):
    print("libkvferry:", text.decode(), file=sys.stderr)


class Library:
    """The functions that are used here; what fails ends the program."""

    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.kvf_status_text.restype = c.c_char_p

    def __getattr__(self, name):
        function = getattr(self.lib, "kvf_" + name)

        def call(*arguments):
            status = function(*arguments)
            if status != 0:
                sys.exit(f"kvf_{name}: {self.lib.kvf_status_text(status).decode()}")

        return call


# --- the model ------------------------------------------------------------------------------------

def digest_of(folder):
    """As kvferry svd has it: the SHA-256 of the file, or of those of several files."""
    names = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
    digests = []
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


class Model:
    """A decoder in fp32, its layers' projections, and what they are rebuilt with."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.config = self.model.config
        self.attentions = [layer.self_attn for layer in self.model.model.layers]
        self.n_layers = len(self.attentions)
        self.heads = self.config.num_key_value_heads
        self.dim = getattr(self.config, "head_dim", None) or (
            self.config.hidden_size // self.config.num_attention_heads)
        self.digest = digest_of(folder)

    def weights(self, n_positions, stored_width, svd_file):
        first = self.attentions[0]
        weights = new(XWeights, d_model=self.config.hidden_size, stored_width=stored_width,
                      svd_file=os.fsencode(svd_file) if svd_file else None,
                      n_layers=self.n_layers, n_heads=self.heads, dim_k=self.dim, dim_v=self.dim,
                      dtype=DTYPE_F32, kv_dtype=DTYPE_F32, rope_style=ROPE_HALF,
                      rope_positions=n_positions,
                      weights_digest=(u8 * 32).from_buffer_copy(self.digest))
        weights.w_k = pointers([a.k_proj.weight for a in self.attentions])
        weights.w_v = pointers([a.v_proj.weight for a in self.attentions])
        if first.k_proj.bias is not None:
            weights.b_k = pointers([a.k_proj.bias for a in self.attentions])
            weights.b_v = pointers([a.v_proj.bias for a in self.attentions])
        if getattr(first, "k_norm", None) is not None:
            weights.k_norm = pointers([a.k_norm.weight for a in self.attentions])
            weights.k_norm_eps = first.k_norm.variance_epsilon
        positions = torch.arange(n_positions)[None]
        cosines, sines = self.model.model.rotary_emb(torch.zeros(1), positions)
        half = cosines.shape[-1] // 2
        weights.rope_dims = 2 * half
        self.tables = [t[0, :, :half].contiguous() for t in (cosines, sines)]
        weights.rope_cos, weights.rope_sin = (t.data_ptr() for t in self.tables)
        return weights

    def prefill(self, tokens, take):
        """Run tokens through the model; take(layer, X) sees each layer's input."""
        hooks = [a.k_proj.register_forward_pre_hook(
            lambda _module, arguments, layer=i: take(layer, arguments[0][0].contiguous()))
                 for i, a in enumerate(self.attentions)]
        with torch.no_grad():
            cache = self.model(tokens[None], use_cache=True).past_key_values
        for hook in hooks:
            hook.remove()
        return cache

    def continue_from(self, cache, token, n):
        """n tokens behind a cache and the token after it, the likeliest each time."""
        out = []
        with torch.no_grad():
            for _ in range(n):
                token = self.model(token.view(1, 1), past_key_values=cache,
                                   use_cache=True).logits[0, -1].argmax()
                out.append(int(token))
        return out


# --- through the cache ----------------------------------------------------------------------------

class Cache:
    """A client whose blocks are X, or latents of X."""

    def __init__(self, options, model, n_tokens):
        self.library = Library(options.library)
        self.model = model
        factors = new(XFactors)
        if options.svd:
            self.library.x_factors_read(os.fsencode(options.svd), c.byref(factors), log, None)
        rank = factors.rank
        self.width = rank or model.config.hidden_size
        self.geometry = new(Geometry, dtype=DTYPE_F32, n_layers=model.n_layers,
                            chunk_tokens=CHUNK_TOKENS)
        self.library.x_geometry(KIND_XG if rank else KIND_X, self.width, c.byref(self.geometry))
        opts = Options()
        self.library.lib.kvf_options_init(c.byref(opts))
        opts.flags, opts.profile = ALLOW_UNCALIBRATED, options.profile.encode()
        opts.socket_path = options.socket.encode() if options.socket else None
        opts.geometry, opts.log = c.pointer(self.geometry), log
        opts.weights_digest = (u8 * 32).from_buffer_copy(model.digest)
        # latents mean nothing by the factors of another run, which may differ in signs already
        opts.factors_digest = factors.digest
        self.client, self.x = ptr(), ptr()
        self.library.open(c.byref(opts), c.byref(self.client))
        self.info = new(Info)
        self.library.client_info(self.client, c.byref(self.info))
        if self.info.profile.decode() != options.profile:
            print(f"the daemon gives {self.info.profile.decode()}, not {options.profile}")
        self.weights = model.weights(n_tokens, rank, options.svd)
        self.library.x_open(self.client, c.byref(self.weights), c.byref(self.x))
        # latents of differences are added up here, as they were when they were put
        self.sums = torch.empty(n_tokens, model.config.hidden_size) if rank else None

    def close(self):
        self.library.lib.kvf_x_close(self.x)
        self.library.lib.kvf_close(self.client)

    def put(self, tokens, names):
        """Prefill, and put each layer as the model computes it. Returns the model's own cache."""
        put = ptr()
        self.library.x_put_begin(self.client, c.byref(new(XPutOptions, n_tokens=len(tokens),
                                                          x=self.x)), c.byref(put))
        own = self.model.prefill(tokens, lambda layer, x: self.library.x_put_layer(
            put, layer, ptr(x.data_ptr()), c.c_size_t(0), None))
        keys = (Key * len(names))(*(Key(c.cast(c.c_char_p(k), ptr), len(k)) for k in names))
        self.library.x_put_end(put, keys, len(names), None, None)
        return own

    def get(self, n_tokens, names):
        """All layers of X, or of latents."""
        stored = torch.empty(self.model.n_layers, n_tokens, self.width)
        keys = (Key * len(names))(*(Key(c.cast(c.c_char_p(k), ptr), len(k)) for k in names))
        hits = (Hit * len(names))()
        self.library.get(self.client, keys, len(names), None, hits)
        for i, hit in enumerate(hits):
            at = stored[:, i * CHUNK_TOKENS:]
            view = new(KvView, tokens_a_page=CHUNK_TOKENS)
            layers = (ptr * self.model.n_layers)(*(layer.data_ptr() for layer in at))
            view.k = TensorView(layers, 0, 4 * self.width, 4 * self.geometry.dim_k)
            self.library.decode(self.client, ptr(hit.record), c.c_size_t(hit.record_bytes), 0, 0, 0,
                                0, c.byref(view))
            self.library.lease_release(self.client, u64(hit.lease))
        return stored, sum(hit.payload_bytes for hit in hits)

    def rebuild(self, stored):
        """K and V of each layer, as transformers keeps them."""
        n, heads, dim = stored.shape[1], self.model.heads, self.model.dim
        shape = (self.model.n_layers, 1, heads, n, dim)
        k, v = torch.empty(shape), torch.empty(shape)
        view = new(KvView, tokens_a_page=n)
        view.k = TensorView(pointers(list(k)), 0, 4 * dim, 4 * n * dim)
        view.v = TensorView(pointers(list(v)), 0, 4 * dim, 4 * n * dim)
        cache = transformers.DynamicCache()
        for layer in range(self.model.n_layers):
            x_input = new(XInput, n_tokens=n, dtype=DTYPE_F32, data=stored[layer].data_ptr(),
                          sums=None if self.sums is None else self.sums.data_ptr())
            self.library.x_rebuild(self.x, layer, c.byref(x_input), c.byref(view))
            cache.update(k[layer], v[layer], layer)
        return cache


    def what_pays(self, n_tokens, n_bytes, seconds):
        """What an engine would ask before it fetches, told how long the fetch before took."""
        config, gate, choice = self.model.config, ptr(), new(XChoice)
        self.library.x_gate_open(self.x, c.byref(new(
            XGateOptions, query_heads=config.num_attention_heads,
            ffn_width=config.intermediate_size)), c.byref(gate))
        self.library.x_gate_note(gate, u64(n_bytes), c.c_double(seconds))
        self.library.x_gate_choose(gate, n_tokens, c.byref(choice))
        self.library.lib.kvf_x_gate_close(gate)
        return choice.why.decode()


def names_of(digest, tokens):
    """A key a chunk, over all tokens up to its end: a hash chain, as engines have."""
    names, name = [], digest
    for first in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[first:first + CHUNK_TOKENS].numpy().tobytes()
        name = hashlib.blake2b(name + chunk, digest_size=32).digest()
        names.append(name)
    return names


def worst_error(own, rebuilt, n_layers):
    """Largest difference of K and V, by the root mean square of the tensor."""
    worst = 0.0
    for layer in range(n_layers):
        for mine, theirs in ((own.layers[layer].keys, rebuilt.layers[layer].keys),
                             (own.layers[layer].values, rebuilt.layers[layer].values)):
            worst = max(worst, float((mine - theirs).abs().max() / mine.pow(2).mean().sqrt()))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokenizer", help="folder of the tokenizer (the model's)")
    parser.add_argument("--profile", default="exact")
    parser.add_argument("--svd", metavar="FILE", help="what kvferry svd has written")
    parser.add_argument("--prompt", default="It was a dark and stormy night, and the rain fell. ")
    parser.add_argument("--repeat", type=int, default=8, help="times the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to continue by")
    parser.add_argument("--library", default="libkvferry.so.0")
    parser.add_argument("--socket")
    options = parser.parse_args()

    model = Model(options.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    tokens = tokenizer(options.prompt * options.repeat, return_tensors="pt").input_ids[0]
    prompt, last = tokens[:-1], tokens[-1]
    names = names_of(model.digest, prompt)

    cache = Cache(options, model, len(prompt))
    own = cache.put(prompt, names)
    begun = time.monotonic()
    stored, n_bytes = cache.get(len(prompt), names)
    fetch_s = time.monotonic() - begun
    begun = time.monotonic()
    rebuilt = cache.rebuild(stored)
    rebuild_ms = 1e3 * (time.monotonic() - begun)
    kv_bytes = 2 * model.n_layers * model.heads * 2 * model.dim * len(prompt)
    print(f"{len(prompt)} tokens as {cache.info.profile.decode()}: {n_bytes} bytes, "
          f"{kv_bytes / n_bytes:.2f} times fewer than K and V in 2 bytes a value; "
          f"rebuilt in {rebuild_ms:.1f} ms")
    print(f"largest error of K or V: {worst_error(own, rebuilt, model.n_layers):.2e} of its root "
          "mean square")
    if options.profile not in ("exact", "raw"):
        print("what pays here:", cache.what_pays(len(prompt), n_bytes, fetch_s))
    from_x = model.continue_from(rebuilt, last, options.new)
    from_kv = model.continue_from(own, last, options.new)
    same = next((i for i in range(options.new) if from_x[i] != from_kv[i]), options.new)
    print(f"{same} of {options.new} tokens are the model's own: {tokenizer.decode(from_x)!r}")
    cache.close()
    return 1 if cache.info.lossless and same < options.new else 0


if __name__ == "__main__":
    sys.exit(main())
