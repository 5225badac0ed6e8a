# SPDX-License-Identifier: Apache-2.0
"""What a model loses when its K and V have gone through a codec: the measurement itself.

Every window is run once with K and V as an engine's cache has them (bf16, K after RoPE), which is
the base, and once for each profile with K and V of all full chunks encoded and decoded as they are
produced, so that each layer sees what the layers below made of decoded K and V. Tokens and queries'
weights are the same; NLL is compared token by token.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import comparators
import maths as maths_module
import model as model_module
import text as text_module
import x_codec
import xquant
from codec import (CHUNK_TOKENS, ITEM_BYTES, RECORD_PAGE_BYTES, ROPE_POST, ROPE_PRE, CodecError,
                   Handle, LayerCodec, Tensor)
from codec import Shape as BlockShape
from command import (ALL, BEFORE_ROPE, CALIBRATED, COMPARATOR, FIRST, PAGES, PROFILE, REFERENCE)

KNOWN = json.loads((Path(__file__).parent / "known.json").read_text(encoding="utf-8"))
PASSAGE = Path(text_module.CAPTURE) / "moby_dick_ch85.txt"  # what comparators are fitted to
CHECK_TOKENS = 256
NLL_TOLERANCE = 1e-3  # nats a token, between numpy, torch and what is written down
README_TOKENS = 2048
RESAMPLES = 4000
SEED = 20


class Unusable(Exception):
    """The measurement cannot go on; the text says why."""


@dataclass
class Row:
    """One model with one profile."""

    model: str
    profile: str
    kind: str  # PROFILE, CALIBRATED, COMPARATOR or REFERENCE
    n_tokens: int
    base_nll: float
    dnll_windows: list[float]
    kl_windows: list[float]
    flips_windows: list[float]
    group_of_windows: list[str]
    payload: float  # of the bytes of bf16 K and V
    block: float  # the same, record page included
    n_parameters: int
    order: str
    maths: str
    seconds: float
    n_starts: int = 1  # windows of a place in the text, over which all of the above are means

    @property
    def n_windows(self) -> int:
        return len(self.dnll_windows)

    @property
    def dnll(self) -> float:
        return float(np.mean(self.dnll_windows))

    @property
    def kl(self) -> float:
        return float(np.mean(self.kl_windows))

    @property
    def flips(self) -> float:
        return float(np.mean(self.flips_windows))

    @property
    def groups(self) -> dict[str, float]:
        """Delta NLL of each text."""
        found: dict[str, list[float]] = {}
        for group, delta in zip(self.group_of_windows, self.dnll_windows):
            found.setdefault(group, []).append(delta)
        return {group: float(np.mean(deltas)) for group, deltas in found.items()}

    def interval(self) -> tuple[float, float]:
        """Bootstrap 95 % of the mean delta NLL: tokens of a window are not independent, nor are
        windows that overlap, so places are drawn."""
        n = self.n_windows
        drawn = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
        means = np.array(self.dnll_windows)[drawn].mean(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        return float(low), float(high)


    def beside(self, other: Row) -> tuple[float, float, float]:
        """How much more this loses than another one on the same text, and the interval of that."""
        difference = np.subtract(self.dnll_windows, other.dnll_windows).tolist()
        both = replace(self, dnll_windows=difference)
        return both.dnll, *both.interval()


class Cache:
    """Rows that are done, one JSON object a line, by what they were measured with."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        if os.path.exists(path):
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the end of a run that was stopped
                self.rows[entry["key"]] = Row(**entry["row"])

    def add(self, key: str, row: Row) -> None:
        self.rows[key] = row
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "row": asdict(row)}) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- models and texts ----------------------------------------------------------------------------

def is_model(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / "config.json").is_file()


def find_models(paths: list[str]) -> list[Path]:
    """Models named, and those in folders named."""
    found: list[Path] = []
    for path in map(Path, paths):
        if is_model(path):
            found.append(path)
        elif path.is_dir():
            found += sorted(child for child in path.iterdir() if is_model(child))
        if not path.exists():
            raise Unusable(f"{path} does not exist")
    if not found:
        raise Unusable("no model: a model is a folder with config.json, or a .gguf file")
    return found


def beside(models: list[Path], name: str) -> Path:
    """A file in the folder of a model, or in that of another one."""
    for path in models:
        for folder in (path, path.parent):
            if (folder / name).is_file():
                return folder / name
        for child in sorted(path.parent.iterdir()):
            if (child / name).is_file():
                return child / name
    raise Unusable(f"no {name} beside the models: name one by --{Path(name).stem}")


def numbered(windows: list) -> list[tuple[str, int]]:
    """For each window its group, and how many of it came before."""
    counts: dict[str, int] = {}
    out = []
    for group, _ in windows:
        out.append((group, counts.get(group, 0)))
        counts[group] = counts.get(group, 0) + 1
    return out


class Subject:
    """A model, its windows, and what it says without a codec."""

    def __init__(self, path: Path, options, models: list[Path], maths) -> None:
        self.name = path.stem if path.suffix == ".gguf" else path.resolve().name
        self.maths = maths
        file = model_module.open_file(path)
        self.digest = file.digest
        if path.suffix == ".gguf":
            tokenizer = text_module.of_gguf(file)
        else:
            own = options.tokenizer or beside([path], "tokenizer.json")
            tokenizer = text_module.of_folder(Path(own))
        self.known = KNOWN["models"].get(file.digest, {})
        self.tokenizer = tokenizer
        self.model = model_module.Model(file, maths)
        self.n_parameters = sum(int(np.prod(weight.shape))
                                for weight in self.model.weights.values())
        text = Path(options.text) if options.text else beside([path, *models], "heldout.txt")
        self.text_digest = digest_of(text)
        groups = [tuple(group) for group in KNOWN["texts"].get(self.text_digest, [])]
        content = text.read_text(encoding="utf-8")
        self.windows_of = lambda n, start=0: text_module.windows(content, groups, tokenizer, n,
                                                                 start)
        found = self.windows_of(options.tokens)
        if not found:
            raise Unusable(f"{text} has fewer than {options.tokens} tokens")
        self.order = (ALL if options.windows >= len(found) else
                      FIRST if options.first else "spread over the text")
        self._choose(options, found)
        shape = self.model.shape
        self.block_shape = BlockShape(shape.n_layers, shape.n_kv_heads, shape.dim)
        self.chunk_bytes = (2 * shape.n_layers * shape.n_kv_heads * shape.dim * CHUNK_TOKENS *
                            ITEM_BYTES)

    def _choose(self, options, found) -> None:
        """The windows, and of each the place that it counts for: windows that begin at several
        tokens of a place overlap."""
        places = (range(options.windows)[: len(found)] if options.first
                  else text_module.spread(range(len(found)), options.windows))
        names = numbered(found)
        self.n_starts = options.starts
        self.windows = [found[place] for place in places]
        self.place_of = list(range(len(places)))
        for i in range(1, options.starts):
            others = self.windows_of(options.tokens, i * options.tokens // options.starts)
            others = dict(zip(numbered(others), others))
            for at, place in enumerate(places):
                if names[place] in others:
                    self.windows.append(others[names[place]])
                    self.place_of.append(at)

    def by_place(self, values: list[float]) -> list[float]:
        sums, counts = (np.bincount(self.place_of, weights) for weights in (values, None))
        return [float(value) for value in sums / counts]

    def batches(self, windows):
        n = self.maths.windows_at_once
        for at in range(0, len(windows), n):
            yield at, np.stack([ids for _, ids in windows[at : at + n]])

    def nll(self, windows, replace=None) -> list[np.ndarray]:
        """Of each window's tokens 1, 2, ..."""
        out = []
        for _, ids in self.batches(windows):
            hidden = self.model.hidden(ids, replace)
            out += [self.model.judge(ids[i], hidden[i])[0] for i in range(len(ids))]
        return out

    def rounded(self, _layer, k, v):
        maths = self.maths
        return tuple(maths.from_bf16(maths.to_bf16(x)) for x in (k, v))

    def run_base(self) -> None:
        """NLL and last hidden states of all windows, and K and V of the first one, for sizes."""
        self.hidden, self.base, self.first = [], [], []

        def keep(layer, k, v):
            if len(self.first) == layer:
                self.first.append(tuple(np.ascontiguousarray(self.maths.to_bf16(x)[0])
                                        for x in (k, v)))
            return self.rounded(layer, k, v)

        for _, ids in self.batches(self.windows):
            hidden = self.model.hidden(ids, keep)
            for i in range(len(ids)):
                self.hidden.append(hidden[i])
                self.base.append(self.model.judge(ids[i], hidden[i])[0])
        self.base_nll = float(np.mean(np.concatenate(self.base)))


# --- is the forward pass right? ------------------------------------------------------------------

def short_nll(subject: Subject) -> float:
    """Of the first tokens of the first window of each group."""
    firsts = {}
    for group, ids in subject.windows_of(CHECK_TOKENS):
        firsts.setdefault(group, (group, ids))
    return float(np.mean(np.concatenate(subject.nll(list(firsts.values())))))


def check_short(subject: Subject) -> None:
    nll = short_nll(subject)
    wanted = subject.known.get("short_nll", {}).get(subject.text_digest)
    say(f"{subject.name}: {subject.maths.name}, NLL of the short check {nll:.5f}, "
        f"{'nothing known to compare with' if wanted is None else f'{wanted:.5f} wanted'}")
    if wanted is not None and abs(nll - wanted) > NLL_TOLERANCE:
        raise Unusable(f"{subject.name}: the forward pass is wrong: NLL {nll:.5f}, not {wanted}")


def check_readme(subject: Subject, groups: list[str]) -> None:
    """Perplexities of whole groups, as the model's README has them."""
    known = subject.known.get("perplexity", {}).get(subject.text_digest, {})
    windows = subject.windows_of(README_TOKENS) if known else []
    for group in groups or list(known):
        if group not in known:
            raise Unusable(f"{subject.name}: no perplexity known for '{group}'")
        chosen = [window for window in windows if window[0] == group]
        ours = float(np.mean(np.concatenate(subject.nll(chosen))))
        wanted = float(np.log(known[group]))
        say(f"{subject.name}: {group}, {len(chosen)} windows of {README_TOKENS}: perplexity "
            f"{np.exp(ours):.3f}, {known[group]:.3f} by transformers")
        if abs(ours - wanted) > NLL_TOLERANCE:
            raise Unusable(f"{subject.name}: {group} has NLL {ours:.5f}, not {wanted:.5f}")


def check(subject: Subject, options) -> None:
    """Before anything is measured; what was measured before was checked then."""
    check_short(subject)
    if options.check or getattr(subject.maths, "device", "cpu") == "cuda":
        check_readme(subject, options.check)


# --- one profile ---------------------------------------------------------------------------------

def tensors(bits: np.ndarray) -> Tensor:
    """One layer of one window, [head, token, dim]."""
    return Tensor((bits.ctypes.data,), bits.strides[0], bits.shape[2])


class Replaced:
    """K and V of a layer through something: through(layer, sources, targets) fills the full chunks
    of targets, which are K and V as sources are: [window, head, token, dim], bf16 bits."""

    def __init__(self, maths, through) -> None:
        self.maths = maths
        self.through = through

    def __call__(self, layer: int, k, v):
        sources = [np.ascontiguousarray(self.maths.to_bf16(x)) for x in (k, v)]
        targets = [self.maths.room(bits.shape) for bits in sources]
        for target, source in zip(targets, sources):
            whole = source.shape[2] // CHUNK_TOKENS * CHUNK_TOKENS
            target[:, :, whole:] = source[:, :, whole:]  # not handed over yet: stays raw
        self.through(layer, sources, targets)
        return tuple(self.maths.from_bf16(bits) for bits in targets)


def through_codec(codec: LayerCodec):
    def through(layer, sources, targets):
        jobs = [tuple((tensors(pair[0][window]), tensors(pair[1][window]))
                      for pair in (sources, targets)) for window in range(len(sources[0]))]
        codec.pass_through(layer, jobs, sources[0].shape[2])

    return through


def through_comparator(comparator, pool: ThreadPoolExecutor):
    def through(layer, sources, targets):
        def window(i):
            whole = sources[0].shape[2] // CHUNK_TOKENS * CHUNK_TOKENS
            k, v = ((bits[i, :, :whole].astype(np.uint32) << 16).view(np.float32)
                    for bits in sources)
            for target, made in zip(targets, comparator(layer, k, v)):
                target[i, :, :whole] = maths_module.bf16_of(made)

        list(pool.map(window, range(len(sources[0]))))

    return through


def block_sizes(subject: Subject, codec: LayerCodec) -> tuple[float, float]:
    """(payload, whole record) of the first window's blocks, of the bytes of bf16 K and V."""
    k, v = (Tensor(tuple(layer[i].ctypes.data for layer in subject.first),
                   subject.first[0][i].strides[0], subject.block_shape.dim) for i in (0, 1))
    n_tokens = subject.first[0][0].shape[1]
    chunks = range(0, n_tokens - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    if not chunks:
        raise Unusable(f"--tokens: a chunk has {CHUNK_TOKENS}")
    raw = len(chunks) * subject.chunk_bytes
    records = sum(codec.block_bytes(k, v, token) for token in chunks)
    return (records - len(chunks) * RECORD_PAGE_BYTES) / raw, records / raw


@dataclass(frozen=True)
class Way:
    """How K and V come about: what Model.hidden takes; begin() gives project for each batch."""

    replace: object = None
    begin: object = lambda: None
    before: object = None


def compare(subject: Subject, way: Way, name: tuple[str, str]) -> Row:
    """All windows with K and V replaced, beside the base. name: of the profile, and its kind. Sizes
    are the caller's."""
    began = time.monotonic()
    deltas, divergences, flips = [], [], []

    def judge(batch):
        at, ids = batch
        hidden = subject.model.hidden(ids, way.replace, way.begin(), way.before)
        return at, [subject.model.judge(ids[i], hidden[i], subject.hidden[at + i])
                    for i in range(len(ids))]

    with ThreadPoolExecutor(subject.maths.batches_at_once) as pool:
        for at, judged in pool.map(judge, subject.batches(subject.windows)):
            for i, (nll, kl, changed) in enumerate(judged):
                deltas.append(float((nll - subject.base[at + i]).mean()))
                divergences.append(float(kl.mean()))
                flips.append(float(changed.mean()))
    if not np.isfinite(deltas).all():
        raise Unusable(f"{subject.name}, {name[0]}: an NLL is not finite")
    found = [subject.by_place(values) for values in (deltas, divergences, flips)]
    groups = [group for group, _ in subject.windows[: len(found[0])]]
    return Row(subject.name, *name, len(subject.windows[0][1]), subject.base_nll, *found, groups,
               1.0, 1.0, subject.n_parameters, subject.order, subject.maths.name,
               time.monotonic() - began, subject.n_starts)


def compare_pages(subject: Subject) -> Row:
    """What rounding K and V to bf16 costs beside fp32, which is part of the base elsewhere."""
    row = compare(subject, Way(), (PAGES, PROFILE))
    row.dnll_windows = [-delta for delta in row.dnll_windows]
    return row


# --- what is measured of a model -----------------------------------------------------------------

class Profile:
    """A profile of the library, built in or made for the model. With BEFORE_ROPE behind its name it
    gets K before RoPE, which is turned behind the decoder."""

    def __init__(self, subject: Subject, library, options, name: str,
                 weights_digest: bytes | None = None) -> None:
        self.name = name
        self.subject = subject
        self.library = library
        self.n_workers = options.workers
        self.weights_digest = weights_digest
        self.profile = name.removesuffix(BEFORE_ROPE)
        self.is_before = self.profile != name
        self.shape = replace(subject.block_shape,
                             rope_state=ROPE_PRE if self.is_before else ROPE_POST)

    def digest(self) -> str:
        handle = Handle(self.library, self.profile, self.shape, self.weights_digest or bytes(32))
        try:
            return handle.digest()
        finally:
            handle.close()

    def measure(self) -> Row:
        subject = self.subject
        codec = LayerCodec(self.library, self.profile, self.shape, self.n_workers,
                           self.weights_digest, subject.maths.windows_at_once)
        try:
            sizes = block_sizes(subject, codec)
            kind = PROFILE if self.weights_digest is None else CALIBRATED
            coded = Replaced(subject.maths, through_codec(codec))
            way = Way(subject.rounded, before=coded) if self.is_before else Way(coded)
            row = compare(subject, way, (self.name, kind))
            row.payload, row.block = sizes
            return row
        finally:
            codec.close()


class Pages:
    """No codec at all."""

    name = PAGES

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def digest(self) -> str:
        return PAGES

    def measure(self) -> Row:
        return compare_pages(self.subject)


class Comparator:
    """What others have published, in Python."""

    def __init__(self, subject: Subject, options, name: str) -> None:
        self.name = name
        self.subject = subject
        self.n_workers = options.workers

    def digest(self) -> str:
        return digest_of(Path(comparators.__file__))

    def measure(self) -> Row:
        subject = self.subject
        made = comparators.make(self.name, subject.model.shape)
        if made.is_fitted:
            passage = PASSAGE.read_text(encoding="utf-8")
            ids = np.array([subject.tokenizer.mark, *subject.tokenizer.encode(passage)])

            def fit(layer, k, v):
                made.fit(layer, *(subject.maths.host(x[0]) for x in (k, v)))
                return k, v

            subject.model.hidden(ids[None], fit)
        with ThreadPoolExecutor(self.n_workers) as pool:
            coded = Replaced(subject.maths, through_comparator(made, pool))
            row = compare(subject, Way(coded), (self.name, COMPARATOR))
        row.payload = made.bits_a_value() / (8 * ITEM_BYTES)
        row.block = row.payload + RECORD_PAGE_BYTES / subject.chunk_bytes
        return row


class XProfile:
    """A profile of the library for X or its latents."""

    def __init__(self, subject: Subject, library, options, name: str) -> None:
        self.name = name
        self.subject = subject
        self.library = library
        self.n_workers = options.workers

    def digest(self) -> str:
        return f"{digest_of(Path(x_codec.__file__))} {digest_of(Path(self.library.path))}"

    def measure(self) -> Row:
        subject = self.subject
        if len(subject.windows[0][1]) % CHUNK_TOKENS:
            raise xquant.Unfit(f"{self.name}: windows of X are measured in whole blocks")
        coded = x_codec.Coded(self.library, self.name, subject.model, self.n_workers)
        try:
            row = compare(subject, Way(subject.rounded, coded.begin), (self.name, PROFILE))
        finally:
            coded.close()
        row.payload = (coded.record_bytes - RECORD_PAGE_BYTES) / subject.chunk_bytes
        row.block = coded.record_bytes / subject.chunk_bytes
        return row


class Reference:
    """X instead of K and V, in Python."""

    def __init__(self, subject: Subject, name: str) -> None:
        self.name = name
        self.subject = subject

    def digest(self) -> str:
        return digest_of(Path(xquant.__file__))

    def measure(self) -> Row:
        subject = self.subject
        made = xquant.Setting(self.name, subject.model)
        row = compare(subject, Way(subject.rounded, made.begin), (self.name, REFERENCE))
        row.payload = made.share()
        row.block = row.payload + RECORD_PAGE_BYTES / subject.chunk_bytes
        return row


def settings_of(subject: Subject, library, options) -> list:
    """What to measure, in order: first what a calibration made for the model."""
    found: list = [Profile(subject, library, options, file.name, file.weights_digest)
                   for file in options.profile_files if file.weights_digest.hex() == subject.digest]
    for name in options.profiles:
        if name == PAGES:
            found.append(Pages(subject))
        elif name in comparators.NAMES:
            found.append(Comparator(subject, options, name))
        elif name in xquant.NAMES:
            found.append(Reference(subject, name))
        elif name in options.x_profiles:
            found.append(XProfile(subject, library, options, name))
        else:
            found.append(Profile(subject, library, options, name))
    return found


def measure_model(subject: Subject, library, options, cache: Cache, began: float) -> list:
    """Rows of all settings, and the reasons of those that this model cannot take or that there was
    no time for."""
    rows: list = []
    has_base = False
    for setting in settings_of(subject, library, options):
        try:
            key = " ".join((subject.digest, subject.text_digest, setting.name, setting.digest(),
                            subject.order, str(len(subject.windows)), str(options.tokens),
                            subject.maths.name))
            if key in cache.rows:
                say(f"{subject.name} {setting.name}: measured before")
            elif options.time is not None and time.monotonic() - began > options.time:
                rows.append((subject.name, setting.name, "no time left"))
                continue
            else:
                if not has_base:
                    check(subject, options)
                    subject.run_base()
                    has_base = True
                row = setting.measure()
                low, high = row.interval()
                say(f"{subject.name} {setting.name}: {row.payload:.4f} of bf16, dNLL "
                    f"{row.dnll:+.5f} ({low:.5f} .. {high:.5f}), KL {row.kl:.5f}, "
                    f"{row.seconds:.1f} s")
                cache.add(key, row)
            rows.append(cache.rows[key])
        except (CodecError, xquant.Unfit) as error:
            say(f"{subject.name} {setting.name}: {error}")
            rows.append((subject.name, setting.name, str(error)))
    return rows


def measure(options, library) -> list:
    """Rows of all models."""
    began = time.monotonic()
    maths = maths_module.choose(options.maths)
    cache = Cache(options.cache)
    models = find_models(options.models)
    rows: list = []
    digests = set()
    for path in models:
        subject = Subject(path, options, models, maths)
        digests.add(subject.digest)
        rows += measure_model(subject, library, options, cache, began)
    for file in options.profile_files:
        if file.weights_digest.hex() not in digests:
            raise Unusable(f"{file.path} is for weights {file.weights_digest.hex()[:16]}..., which "
                           "none of the models has (the SHA-256 of model.safetensors or GGUF)")
    return rows
