"""The residual adapter: what pruning took away, as far as rank r can hold it, and the step that its training may take.

With E = W - W_hat and its singular values s_1 >= s_2 >= ..., the best A, B of rank r are U_r sqrt(S_r), sqrt(S_r)
V_r^T, and what is left has (sum over i > r of s_i^2) / (sum of s_i^2) <= 1 - r / min(d, k) of the squared error (SALR,
arXiv 2601.16991, theorem 3), with equality only for a flat spectrum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXACT = 1024
"""Up to this many rows or columns the SVD is exact; above, randomised with power iterations."""


def truncated_svd(error: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(A [r, K], B [N, r]) with B A the best approximation of E [N, K] of rank r; in fp32 or wider.

    Larger matrices use `torch.svd_lowrank` with 8 more columns and 4 power iterations, from its own seed: same input,
    same adapter. Raises ValueError if `rank` is above min(N, K).
    """
    if rank > min(error.shape):
        raise ValueError(f"rank {rank} is above the smaller side of {tuple(error.shape)}")
    wide = error if error.dtype == torch.float64 else error.float()
    if rank == 0:
        return wide.new_zeros((0, error.shape[1])), wide.new_zeros((error.shape[0], 0))
    wider = 2 * rank + 16
    if min(error.shape) <= EXACT or wider > min(error.shape) // 2:
        u, s, vt = torch.linalg.svd(wide, full_matrices=False)
        v = vt.t()
    else:
        with torch.random.fork_rng(devices=[wide.device] if wide.is_cuda else []):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(wide, q=wider, niter=6)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).t().contiguous(), (u[:, :rank] * root).contiguous()


def largest_singular_value(x: Tensor, iterations: int = 50) -> float:
    """sigma_max of a matrix by power iteration on X^T X, to about 1e-3 from below for separated spectra."""
    wide = x.detach().reshape(-1, x.shape[-1]).float()
    generator = torch.Generator(device="cpu").manual_seed(0)
    v = torch.randn(wide.shape[1], generator=generator).to(wide.device)
    sigma = wide.new_zeros(())
    for _ in range(iterations):
        v = wide.t() @ (wide @ v)
        sigma = v.norm()
        if sigma == 0:
            return 0.0
        v = v / sigma
    return float(sigma.sqrt())


def residual_step(x: Tensor) -> float:
    """1 / sigma_max(X)^2, the step of theorem 4 for a layer whose inputs are X [samples, K].

    For the loss ||X (E_hat - E)||^2 / 2 gradient descent on E_hat is stable below 2 / sigma_max^2, and this is the step
    with guaranteed descent. A loss that averages over samples or tokens scales its gradient, and so this step, by its
    count.
    """
    sigma = largest_singular_value(x)
    return 1.0 / sigma**2 if sigma else float("inf")


def residual_steps(model: nn.Module, *inputs: object, **keywords: object) -> dict[str, float]:
    """{path of a SALR layer: `residual_step` of what it sees} for one forward pass of the model on these arguments."""
    from simkit.kernels.salr.linear import SALRLinear

    found: dict[str, float] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, SALRLinear):

            def note(_: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
                step = residual_step(arguments[0])
                found[name] = min(step, found.get(name, step))

            handles.append(layer.register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            model(*inputs, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return found


def parameter_groups(model: nn.Module, lr: float, steps: dict[str, float]) -> list[dict[str, object]]:
    """Groups for a torch optimizer: residual adapters with the step of their layer, what else is trained with `lr`."""
    groups: list[dict[str, object]] = []
    own: set[int] = set()
    for name, step in steps.items():
        layer = model.get_submodule(name)
        parameters = [p for p in (layer.residual_a, layer.residual_b) if p.requires_grad]
        if parameters:
            groups.append({"params": parameters, "lr": step})
            own.update(id(p) for p in parameters)
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    return ([{"params": rest, "lr": lr}] if rest else []) + groups
