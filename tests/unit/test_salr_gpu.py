"""The Triton kernel: right in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

CHECK = """
import torch
from simkit.kernels.salr import gpu, reference
from simkit.kernels.salr.encoding import encode
from simkit.kernels.salr.masks import magnitude_mask
torch.manual_seed(0)
for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
    for m, n, k, r in ((1, 9, 70, 0), (5, 70, 130, 24)):
        w = torch.randn(n, k).to(dtype)
        e = encode(w, magnitude_mask(w, 0.5))
        x, a, b = torch.randn(m, k).to(dtype), (torch.randn(r, k) / 8).to(dtype), torch.randn(n, r).to(dtype)
        bias = torch.randn(n).to(dtype) if r else None
        y = gpu.linear(x, e.bits, e.values, e.offsets, a, b, bias, n).double()
        wide = None if bias is None else bias.double()
        right = reference.salr_linear(x.double(), e.bits, e.values.double(), a.double(), b.double(), wide, n)
        error = float((y - right).norm() / right.norm())
        assert error < bound, (dtype, m, n, k, r, error)
"""


def test_the_kernel_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=300, env=environment)


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_it_compiles_for_a_gpu_that_is_not_here(capability: int) -> None:
    from simkit.kernels.salr import gpu

    assembly = gpu.compile_for(capability).asm
    assert len(assembly["cubin"]) > 1000
    text = assembly["ptx"]
    assert "wgmma" in text or "mma.sync" in text, "tensor cores"
    assert "cp.async" in text, "loads run beside the products"
    assert "popc" in text
