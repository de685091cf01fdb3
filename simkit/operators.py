"""One row of an operator table, priced: collectives by the network model, kernels by the roofline.

What a benchmark does beside the kernel it names is told here too (`work`), for `simkit calibrate` fits with the same
figures that `simkit validate` predicts with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from simkit import network, plugins, roofline
from simkit.errors import InputError, RefusedError, unknown
from simkit.price import pricing
from simkit.roofline import Columns, Law
from simkit.spec import load
from simkit.spec.cluster import cluster as parse_cluster
from simkit.spec.hardware import Cluster, Device
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.spec.priors import prior
from simkit.spec.stack import DEFAULT, stack

COLLECTIVES = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"}
)
KERNELS = frozenset({"gemm", "conv", "memory", "attention_prefill", "attention_decode"})
INTERVAL = {
    "collective": (0.7, 1.45),
    "gemm": (0.8, 1.3),
    "conv": (0.7, 1.45),
    "memory": (0.75, 1.3),
    "attention": (0.8, 1.25),
    "compress": (0.5, 2.0),
}
"""Factors of a 90 % interval per kind of operator, from the residuals that `simkit calibrate` prints."""
COMPRESS = "compress_"
"""What the operator of a row is called that compresses and decompresses gradients: ``compress_topk-sgd``."""
WEIGHT_BYTES = {"int8wo": 1.0, "int4wo": 0.5}
"""Bytes of a weight where only the weights are quantised and arithmetic is 16-bit."""
QUANTISED_BYTES = 5.0
"""Bytes an element of `in` that an engine quantises to fp8 first: reads for the scale (2), reads again (2), writes
(1)."""
QUANTISED_KERNELS = 2.0
ACCUMULATED_BYTES = {"out fp32, accumulates": 6.0, "out bf16, accumulates": 2.0}
"""Bytes beyond the 2 of an element of `out` that a product which adds to what is there moves."""
FLASH_ENGINE = "vllm"
"""The engine whose prefill kernel is the FlashAttention of training."""
KERNEL_ALONE = "kernel"
"""The engine of rows that time the attention kernel without what an engine does around it."""
EAGER_ENGINE = "eager"
"""The engine of a ``memory`` row that is a point-wise operator of an eager framework rather than a plain stream."""
DECODE_FRACTION, PASSES, LAUNCH_S = 0.85, 1.3, 1e-5
"""Fraction of the memory bandwidth that decoding reaches; how often an engine moves q, k, v and the result beside its
fused kernel (rotary embedding, cache, layout); its launches: where neither device nor priors say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one row of a table does. kind: of `roofline.KINDS`; batch, m, n, k, nbytes: of the kernel it names;
    side_bytes, kernels: moved and launched around it; arithmetic: dtype whose peak counts; engine: free text, as the
    table gives it; decode: one query a sequence, bound by the cache of keys and values."""

    kind: int
    batch: float
    m: float
    n: float
    k: float
    nbytes: float
    side_bytes: float = 0.0
    kernels: float = 1.0
    arithmetic: str = "fp32"
    engine: str = ""
    decode: bool = False


def work(row: Mapping[str, str]) -> Work:
    """The Work of a row whose `op` is one of `KERNELS` (an empty one is a gemm). Raises RefusedError for an operator or
    dtype that is not modelled, InputError for a number that is none."""
    op, dtype = row.get("op", "") or "gemm", row.get("dtype", "") or "fp32"
    if op not in KERNELS or row.get("sparsity", "") not in ("", "none"):
        raise RefusedError(f"op = {op} is not modelled yet")
    arithmetic = "bf16" if dtype in WEIGHT_BYTES else dtype
    if arithmetic not in DTYPE_BYTES or dtype in ("int4", "nf4"):
        raise RefusedError(f"dtype = {dtype} is not modelled yet")
    if op in ("gemm", "conv"):
        return _product(row, dtype, arithmetic, conv=op == "conv")
    if op == "memory":
        nbytes, engine = _number(row, "bytes"), row.get("engine", "")
        none = 0.0
        return Work(
            kind=roofline.MEMORY,
            batch=none,
            m=none,
            n=none,
            k=none,
            nbytes=nbytes,
            arithmetic=arithmetic,
            engine=engine,
        )
    return _attention(row, op, arithmetic)


def _product(row: Mapping[str, str], dtype: str, arithmetic: str, *, conv: bool = False) -> Work:
    """A product, or a convolution as the product of its shape, whose input is not unfolded: its bytes are left out."""
    batch, m, n, k = (_number(row, c, 1.0 if c == "batch" else 0.0) for c in ("batch", "m", "n", "k"))
    element = DTYPE_BYTES[arithmetic]
    nbytes = batch * ((m * k * (not conv) + m * n) * element + k * n * WEIGHT_BYTES.get(dtype, element))
    engine, notes = row.get("engine", ""), row.get("notes", "")
    extra = next((b for words, b in ACCUMULATED_BYTES.items() if words in notes), 0.0)
    quantises = dtype == "fp8" and engine != ""
    return Work(
        kind=roofline.CONV if conv else roofline.GEMM,
        batch=batch,
        m=m,
        n=n,
        k=k,
        nbytes=nbytes + extra * batch * m * n,
        side_bytes=QUANTISED_BYTES * batch * m * k if quantises else 0.0,
        kernels=1.0 + (QUANTISED_KERNELS if quantises else 0.0),
        arithmetic=arithmetic,
        engine=engine,
    )


def _attention(row: Mapping[str, str], op: str, arithmetic: str) -> Work:
    """Causal attention of q_len queries, the last of kv_len keys, over `batch` sequences."""
    batch, heads, width = _number(row, "batch", 1.0), _number(row, "heads"), _number(row, "head_dim", 128.0)
    groups, q, s = _number(row, "kv_heads", heads), _number(row, "q_len", 1.0), _number(row, "kv_len")
    element = DTYPE_BYTES[arithmetic]
    cached = DTYPE_BYTES.get(row.get("kv_dtype", ""), element)
    queries, keys = 2.0 * batch * q * heads * width * element, 2.0 * batch * s * groups * width
    seen = 1.0 - (q - 1.0) / (2.0 * s) if s else 0.0
    decode = op == "attention_decode"
    return Work(
        kind=roofline.ATTENTION,
        batch=batch * heads,
        m=q,
        n=s,
        k=2.0 * width * seen,
        nbytes=queries + keys * cached,
        side_bytes=0.0 if decode or row.get("engine") == KERNEL_ALONE else queries + keys * element,
        arithmetic=arithmetic,
        engine=row.get("engine", ""),
        decode=decode,
    )


def compression_s(row: Mapping[str, str], law: Law) -> float:
    """Seconds in which one rank compresses `batch` gradients of m x n and decompresses what it would receive from
    `ranks` (default 1), the mean over the steps of the method; `rank` and `density` as in a scenario.

    Raises InputError for a method nobody wrote.
    """
    method = row.get("op", "")[len(COMPRESS) :]
    if method not in plugins.names("simkit.compressors"):
        raise unknown("method", method, plugins.names("simkit.compressors"), key="op")
    module, ranks = plugins.get("simkit.compressors", method), _whole(row, "ranks", 1)
    plan = Plan(
        method=method, rank=_whole(row, "rank", 4), density=_number(row, "density", 0.01), fusion="all", dp=ranks
    )
    shapes = ((_whole(row, "m"), _whole(row, "n")),) * _whole(row, "batch", 1)
    stages = [("encode", None), *(("between", p) for p in range(1, module.PHASES)), ("decode", None)]
    total = 0.0
    factor = dict(law.compress).get(method, 1.0)
    for variant in range(module.variants(plan)):
        for stage, phase in stages:
            done = module.work(shapes, plan=plan, stage=stage, variant=variant, ranks=ranks, phase=phase)
            total += float(roofline.seconds(done.columns, law)[0].sum())
    return total / int(module.variants(plan)) * factor


def resident(nbytes: float, device: Device) -> float:
    """Bytes of device memory that would take as long: what a benchmark repeats on the same buffers stays in a
    second-level cache that holds all of it."""
    return nbytes / roofline.L2_SPEED if device.l2_bytes and nbytes <= device.l2_bytes else nbytes


def predict_operator(
    row: Mapping[str, str], *, profiles: tuple[str, ...] = (), calibration: bool = True
) -> tuple[float, float, float]:
    """(predicted, low, high) of a row with an `op`. Raises RefusedError for an operator that is not modelled."""
    op = row.get("op", "") or "gemm"
    if op in COLLECTIVES:
        value, _ = network.predict_row(row, _cluster(row, profiles, calibration))
        kind = "collective"
    elif op.startswith(COMPRESS):
        device = load.device(row.get("device", ""), profiles=profiles, calibration=calibration)
        value, kind = compression_s(row, predict_law(device, "fp32", calibration)), "compress"
    else:
        device = load.device(row.get("device", ""), profiles=profiles, calibration=calibration)
        value = _compute(work(row), device, calibration)
        kind = op.partition("_")[0]
    low, high = INTERVAL[kind]
    if row.get("metric") == "busbw":
        low, high = 1.0 / high, 1.0 / low
    return value, value * low, value * high


def _cluster(row: Mapping[str, str], profiles: tuple[str, ...], calibration: bool) -> Cluster:
    ranks, per_node = _whole(row, "ranks"), _whole(row, "gpus_per_node", _whole(row, "ranks"))
    nodes = -(-ranks // per_node)
    nics = _whole(row, "nics_per_node", 0) or None
    text = f"{nodes}x{min(ranks, per_node)}x{row.get('device', '')}"
    return _parsed(text, row.get("intra") or None, row.get("inter") or None, nics, profiles, calibration)


@lru_cache(maxsize=256)
def _parsed(
    text: str, intra: str | None, inter: str | None, nics: int | None, profiles: tuple[str, ...], calibration: bool
) -> Cluster:
    return parse_cluster(
        text, intra=intra, inter=inter, nics_per_node=nics, profiles=profiles, calibration=calibration
    )[0]


def _whole(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key, "")
    if not text and default is not None:
        return default
    try:
        number = int(float(text))
    except (ValueError, OverflowError):
        raise InputError("is not a whole number", key=key, value=text) from None
    if number < 0:
        raise InputError("is negative", key=key, value=text)
    return number


def _number(row: Mapping[str, str], key: str, default: float = 0.0) -> float:
    text = row.get(key, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise InputError("is not a number", key=key, value=text) from None


def _compute(done: Work, device: Device, calibration: bool) -> float:
    """Seconds of a kernel and of what surrounds it."""
    law = predict_law(device, done.arithmetic, calibration)
    if done.kind == roofline.ATTENTION:
        return _fused(done, device, law, calibration)
    return seconds_of(done, device, law)


def predict_law(device: Device, arithmetic: str, calibration: bool = True) -> Law:
    """The law of operator benchmarks, which are short: the clock under load (`sustained`) is that of training."""
    priced = pricing(device, arithmetic, stack(DEFAULT), calibration=calibration, eight_bit_attention=True)
    return replace(priced.law, sustained=1.0)


def seconds_of(done: Work, device: Device, law: Law) -> float:
    """Seconds of a product, a convolution or a stream, and of what surrounds it."""
    around_s = done.side_bytes / law.memory_Bps + (done.kernels - 1.0) * law.kernel_s
    if done.engine == EAGER_ENGINE:
        return around_s + _kernel(done, done.nbytes, 1.0, law)
    counted = law.elementwise if done.kind == roofline.MEMORY else 1.0
    return around_s + _kernel(done, resident(done.nbytes, device) / counted, 1.0, law)


def _fused(done: Work, device: Device, law: Law, calibration: bool) -> float:
    """Attention in an inference engine: its kernel, and what the engine launches and moves around it."""
    fits = device.calibration if calibration else {}

    def constant(name: str, pool: str, key: str, default: float) -> float:
        return fits[name].get(key, default) if name in fits else prior(pool, key, default)

    nbytes = resident(done.nbytes, device)
    if done.decode:
        fraction = constant("decode", "decode", "fraction", DECODE_FRACTION)
        return nbytes / (device.memory_Bps * fraction) + constant("decode", "decode", "launch_s", LAUNCH_S)
    name, launch = f"attention.{done.arithmetic}", "launch_s"
    if done.engine != FLASH_ENGINE and "other_engine" in (fits[name].values if name in fits else {}):
        law = replace(law, attention_ceiling=law.attention_ceiling * fits[name]["other_engine"])
        launch = "other_launch_s"
    around_s = constant(name, "attention", "passes", PASSES) * done.side_bytes / law.memory_Bps
    return around_s + constant(name, "attention", launch, LAUNCH_S) + _kernel(done, nbytes, 0.0, law)


def _kernel(done: Work, nbytes: float, kernels: float, law: Law) -> float:
    columns = Columns(
        kind=np.array([done.kind], dtype=np.int8),
        batch=np.array([done.batch]),
        m=np.array([done.m]),
        n=np.array([done.n]),
        k=np.array([done.k]),
        nbytes=np.array([nbytes]),
        kernels=np.array([kernels]),
    )
    return float(roofline.seconds(columns, law)[0][0])
