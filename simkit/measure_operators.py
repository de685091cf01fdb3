"""Suite ``operators``: the operators of training and inference, one by one, after those of suite ``device``.

``gemm`` of linear layers and of their gradients, skinny ones of decoding; ``conv``; ``compress_<method>`` of gradients;
``attention_prefill`` and ``attention_decode``; ``memory`` of norms, activations, residual additions and optimizers,
where `bytes` are those that the operator must move (each operand once), as `simkit.workloads` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simkit import measure_device
from simkit.measure import Case, Options, Samples
from simkit.measure_device import memory_case, of_dtype, timed
from simkit.measure_machine import Machine, torch_or_complain
from simkit.measure_timing import Timer
from simkit.operators import COMPRESS, EAGER_ENGINE

TABLE = "kernel"
TAKES: tuple[str, ...] = ()
FP32 = 4.0
LINEAR = ((512, 256, 256), (512, 1024, 256), (512, 256, 1024), (2048, 768, 768), (2048, 3072, 768), (256, 512, 512))
"""(tokens, out, in) of linear layers on a CPU; each also as its two gradients."""
CUDA_LINEAR = ((2048, 4096, 4096), (2048, 11008, 4096), (2048, 4096, 11008), (8192, 4096, 4096))
SKINNY = ((1, 4096, 4096), (4, 4096, 4096), (16, 4096, 4096))
CONVS = ((8, 32, 32, 32, 3), (8, 64, 64, 16, 3), (8, 128, 128, 8, 3), (8, 3, 32, 32, 3))
"""(images, channels in, out, side, kernel)."""
HEADS, HEAD_DIM = 4, 64
PREFILL, DECODE = ((8, 64), (4, 256), (1, 1024)), ((1, 1024), (8, 512))
POINTWISE = 512 * 1024
"""Elements of an activation of a small transformer."""
COMPRESSED = ((4, 1024, 256), (12, 256, 256), (1, 2048, 512), (6, 1024, 512))
"""(gradients, rows, columns) of a bucket."""
VOTES = 4
"""Ranks whose contributions are decompressed."""
PARAMETERS = 2_800_000
"""Of an optimizer step: it moves less than what `simkit calibrate` takes for a stream."""


def cases(host: Machine, options: Options) -> list[Case]:
    """The benchmarks of operators, those of the device among them."""
    torch = torch_or_complain()
    timer = Timer(torch, host.device, quick=options.quick, cpu_time=host.device == "cpu" and host.threads == 1)
    linear = list(LINEAR if host.device == "cpu" else CUDA_LINEAR)[: 3 if options.quick else None]
    products = []
    for dtype in measure_device.dtypes(host)[:1]:
        for m, n, k in linear:
            products += [(dtype, 1, m, n, k), (dtype, 1, m, k, n), (dtype, 1, n, k, m)]
        products += [(dtype, 1, *shape) for shape in SKINNY[: 1 if options.quick else None]]
    found = [*measure_device.cases(host, options), *measure_device.gemms(torch, timer, host, products)]
    found += [_conv(torch, timer, host, shape) for shape in CONVS[: 2 if options.quick else None]]
    found += [_attention(torch, timer, host, *s, s[1]) for s in PREFILL[: 2 if options.quick else None]]
    found += [_attention(torch, timer, host, b, 1, s) for b, s in DECODE[: 1 if options.quick else None]]
    found += [*_pointwise(torch, timer, host), *_optimizers(torch, timer, host)]
    return unique([*found, *compressor_cases(torch, timer, host, quick=options.quick)])


def unique(found: list[Case]) -> list[Case]:
    """The cases, each id once."""
    return list({case.id: case for case in found}.values())


def _conv(torch: Any, timer: Timer, host: Machine, shape: tuple[int, int, int, int, int]) -> Case:
    images, c_in, c_out, side, kernel = shape

    def make() -> Callable[[], object]:
        x = torch.randn(images, c_in, side, side, device=host.device)
        w = torch.randn(c_out, c_in, kernel, kernel, device=host.device)
        return lambda: torch.nn.functional.conv2d(x, w, padding=kernel // 2)

    fields = {"device": host.name, "op": "conv", "dtype": "fp32", "batch": 1}
    fields |= {"m": images * side * side, "n": c_out, "k": c_in * kernel * kernel}
    name = f"conv/{images}x{c_in}x{side}x{side}-{c_out}-{kernel}"
    return Case(id=name, fields=fields, run=lambda: timed(timer, make))


def _attention(torch: Any, timer: Timer, host: Machine, batch: int, q_len: int, kv_len: int) -> Case:
    decode, dtype = q_len == 1, measure_device.dtypes(host)[0]

    def make() -> Callable[[], object]:
        kind = of_dtype(torch, dtype)
        q = torch.randn(batch, HEADS, q_len, HEAD_DIM, device=host.device).to(kind)
        k, v = (torch.randn(batch, HEADS, kv_len, HEAD_DIM, device=host.device).to(kind) for _ in range(2))
        fused = torch.nn.functional.scaled_dot_product_attention
        return lambda: fused(q, k, v, is_causal=not decode)

    op = "attention_decode" if decode else "attention_prefill"
    fields = {"device": host.name, "op": op, "dtype": dtype, "batch": batch, "heads": HEADS, "kv_heads": HEADS}
    fields |= {"head_dim": HEAD_DIM, "q_len": q_len, "kv_len": kv_len}
    name = f"{op}/{dtype}/{batch}x{q_len}x{kv_len}"
    return Case(id=name, fields=fields, run=lambda: timed(timer, make))


def _pointwise(torch: Any, timer: Timer, host: Machine) -> list[Case]:
    """Forward and, where it has work of its own, backward kernels of what stands between products."""
    functional, aten, width = torch.nn.functional, torch.ops.aten, 1024

    def data(count: int) -> list[Any]:
        return [torch.randn(POINTWISE // width, width, device=host.device) for _ in range(count)]

    def norm() -> Callable[[], object]:
        (x,), w = data(1), torch.ones(width, device=host.device)
        return lambda: functional.layer_norm(x, (width,), w, w)

    def norm_grad() -> Callable[[], object]:
        (x, g), w = data(2), torch.ones(width, device=host.device)
        _, mean, spread = aten.native_layer_norm(x, [width], w, w, 1e-5)
        return lambda: aten.native_layer_norm_backward(g, x, [width], mean, spread, w, w, [True, True, True])

    def two(function: Callable[..., object], count: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            held = data(count)
            return lambda: function(*held)

        return make

    n = FP32 * POINTWISE
    found: list[tuple[str, float, Callable[[], Callable[[], object]]]] = [
        ("layer_norm", 2 * n, norm),
        ("layer_norm_grad", 3 * n, norm_grad),
        ("gelu", 2 * n, two(functional.gelu, 1)),
        ("gelu_grad", 3 * n, two(aten.gelu_backward, 2)),
        ("relu", 2 * n, two(torch.relu, 1)),
        ("softmax", 2 * n, two(lambda x: torch.softmax(x, -1), 1)),
        ("residual", 3 * n, two(torch.add, 2)),
    ]
    return [
        memory_case(timer, host, f"memory/{name}", nbytes, make, notes=name, engine=EAGER_ENGINE)
        for name, nbytes, make in found
    ]


def _optimizers(torch: Any, timer: Timer, host: Machine) -> list[Case]:
    """One step; bytes as `simkit/spec/stacks/pytorch.toml` counts them."""
    from simkit.spec.stack import DEFAULT, stack

    moved = stack(DEFAULT).optimizer_bytes

    def step(kind: str) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            shards = [torch.nn.Parameter(torch.randn(PARAMETERS // 7, device=host.device)) for _ in range(7)]
            for p in shards:
                p.grad = torch.randn_like(p)
            optim = torch.optim
            optimizer = optim.AdamW(shards) if kind == "adamw" else optim.SGD(shards, lr=1e-9, momentum=0.9)
            return lambda: (optimizer.step(), optimizer.zero_grad(set_to_none=False))

        return make

    return [
        memory_case(
            timer, host, f"memory/{kind}", moved[kind] * PARAMETERS, step(kind), notes=f"optimizer {kind}"
        )
        for kind in ("sgd-momentum", "adamw")
    ]


def compressor_cases(torch: Any, timer: Timer, host: Machine, *, quick: bool) -> list[Case]:
    """Compression of a bucket of gradients and decompression of what comes back, without a network: the votes or pairs
    of `VOTES` ranks are this rank's own."""
    from simkit.kernels.compressors import methods

    shapes = COMPRESSED[: 1 if quick else None]
    return [_compressor(torch, timer, host, method, *shape) for method in methods() for shape in shapes]


def _compressor(torch: Any, timer: Timer, host: Machine, method: str, count: int, m: int, n: int) -> Case:
    from simkit.measure_bucket import Bucket, alone

    def make() -> Callable[[], object]:
        bucket = Bucket(torch, [(m, n)] * count, host.device)
        state, hook = alone(method, VOTES)
        return lambda: hook(state, bucket).wait()

    fields = {"device": host.name, "op": f"{COMPRESS}{method}", "dtype": "fp32", "batch": count, "m": m, "n": n}
    fields |= {"ranks": VOTES, "rank": 4, "density": 0.01}
    # In training a bucket comes out of back-propagation, and the caches hold something else.
    run = lambda: Samples({"time_s": timer.cold(make())}, "cold caches")  # noqa: E731
    return Case(id=f"compress/{method}/{count}x{m}x{n}", fields=fields, run=run)
