"""The Triton kernel: a tile of W is decoded while tensor cores multiply the one before, and all adapters join the sum.

A program owns BLOCK_M rows of x and BLOCK_N rows of W. For each word of 64 columns it reads the masks of its rows,
counts bits to know where each kept value lies, gathers the values into a dense tile [BLOCK_N, 64] and feeds it to
`dot`. Loads are pipelined (`num_stages`): the two stages of SALR (arXiv 2601.16991). z = x A^T comes from one product
outside; z B^T is one more `dot` on the same accumulator.

Checked in Triton's interpreter, and compiled ahead of time for sm_80, 86, 89 and 90. Nothing is claimed of its speed.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the module still says that there is no kernel
    triton = None


@cache
def available() -> bool:
    """Whether the kernel runs on this machine's GPU."""
    return triton is not None and torch.cuda.is_available()


if triton is not None:

    @triton.jit
    def popcount(v):
        """Bits set in an unsigned 64-bit integer: plain integer operations, which the compiler turns into popc."""
        v = v - ((v >> 1) & 0x5555555555555555)
        v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F
        return ((v * 0x0101010101010101) >> 56).to(tl.int32)

    @triton.jit
    def kernel(
        x_ptr, bits_ptr, vals_ptr, offs_ptr, z_ptr, b_ptr, bias_ptr, y_ptr,
        M, N, K, R, WORDS,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
        HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rk = tl.arange(0, 64)
        inside, group, row = rn < N, rn // 4, rn % 4
        base = tl.load(offs_ptr + group, mask=inside, other=0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        one = tl.full([1, 64], 1, tl.uint64)
        shift = rk.to(tl.uint64)[None, :]
        for i in tl.range(0, WORDS, num_stages=STAGES):
            x = tl.load(
                x_ptr + rm[:, None].to(tl.int64) * K + (i * 64 + rk)[None, :],
                mask=(rm[:, None] < M) & ((i * 64 + rk)[None, :] < K),
                other=0.0,
            )
            place = bits_ptr + (group.to(tl.int64) * WORDS + i) * 4
            # The values of a word's four rows follow one another: what the rows before this one keep is skipped.
            w = tl.load(place + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
            c0 = popcount(tl.load(place, mask=inside, other=0).to(tl.uint64, bitcast=True))
            c1 = popcount(tl.load(place + 1, mask=inside, other=0).to(tl.uint64, bitcast=True))
            c2 = popcount(tl.load(place + 2, mask=inside, other=0).to(tl.uint64, bitcast=True))
            c3 = popcount(tl.load(place + 3, mask=inside, other=0).to(tl.uint64, bitcast=True))
            start = base + tl.where(row > 0, c0, 0) + tl.where(row > 1, c1, 0) + tl.where(row > 2, c2, 0)
            base += c0 + c1 + c2 + c3
            kept = (w[:, None] >> shift) & 1
            before = popcount(w[:, None] & ((one << shift) - 1))
            tile = tl.load(vals_ptr + start[:, None] + before, mask=kept == 1, other=0.0)
            if WIDEN:  # the interpreter hands bfloat16 to numpy as raw integers
                acc = tl.dot(x.to(tl.float32), tl.trans(tile.to(tl.float32)), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.trans(tile), acc, input_precision="ieee")
        rr = tl.arange(0, BLOCK_R)
        for r0 in tl.range(0, R, BLOCK_R):
            z = tl.load(
                z_ptr + rm[:, None] * R + (r0 + rr)[None, :],
                mask=(rm[:, None] < M) & ((r0 + rr)[None, :] < R),
                other=0.0,
            )
            b = tl.load(
                b_ptr + rn[:, None] * R + (r0 + rr)[None, :],
                mask=inside[:, None] & ((r0 + rr)[None, :] < R),
                other=0.0,
            )
            if WIDEN:
                acc = tl.dot(z.to(tl.float32), tl.trans(b.to(tl.float32)), acc, input_precision="ieee")
            else:
                acc = tl.dot(z, tl.trans(b), acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rn, mask=inside, other=0.0).to(tl.float32)[None, :]
        at = y_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(rm[:, None] < M) & inside[None, :])


def linear(
    x: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """`reference.salr_linear` on the device of x."""
    m, k = x.shape
    x, b = x.contiguous(), b.to(x.dtype).contiguous()
    z = (x @ a.to(x.dtype).t()).contiguous()
    y = torch.empty((m, rows), dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    block_m = 16 if m <= 16 else 64
    block_n = 32 if m <= 16 else 64
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernel[(triton.cdiv(m, block_m), triton.cdiv(rows, block_n))](
        x, bits, values, offsets, z, b, x if bias is None else bias, y,
        m, rows, k, a.shape[0], bits.shape[1],
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=16,
        HAS_BIAS=bias is not None, WIDEN=interpreted and x.dtype != torch.float32, STAGES=3,
        num_warps=4,
    )  # fmt: skip
    return y


def compile_for(capability: int, dtype: str = "fp16", block_m: int = 64, block_n: int = 64) -> object:
    """The kernel compiled for sm_`capability` without a GPU; its `asm` holds ptx and cubin."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointer = f"*{dtype}"
    names = dict.fromkeys(("x_ptr", "vals_ptr", "z_ptr", "b_ptr", "bias_ptr", "y_ptr"), pointer)
    order = ("x_ptr", "bits_ptr", "vals_ptr", "offs_ptr", "z_ptr", "b_ptr", "bias_ptr", "y_ptr")
    signature = {n: names.get(n, "*i64") for n in order} | dict.fromkeys(("M", "N", "K", "R", "WORDS"), "i32")
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_R": 16,
        "HAS_BIAS": True,
        "WIDEN": False,
        "STAGES": 3,
    }
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(order))}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 3})
