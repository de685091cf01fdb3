"""`SALRLinear`: a linear layer whose base is pruned and encoded, with a residual adapter and any number of task
adapters."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor, nn

from simkit.errors import InputError, unknown
from simkit.kernels.lora import DEFAULT_SCALE
from simkit.kernels.salr import native, ops
from simkit.kernels.salr.encoding import GROUP, PAD, WORD, encode
from simkit.kernels.salr.lowrank import truncated_svd
from simkit.kernels.salr.masks import magnitude_mask
from simkit.kernels.salr.quantize import Packed, pack, unpack


class Adapter(nn.Module):
    """One low-rank pair: A [r, in] (Kaiming-uniform), B [out, r] (zero), with its scale and whether it is active.

    Both travel with the state in an integer buffer, which a change of dtype leaves alone and safetensors can hold.
    """

    settings: Tensor

    def __init__(self, rank: int, inputs: int, outputs: int, scale: float, *, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, inputs, device=device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank, device=device, dtype=dtype))
        self.register_buffer("settings", torch.zeros(2, dtype=torch.int64, device=device))
        self.set(scale, True)
        if self.lora_a.device.type != "meta":
            nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def set(self, scale: float, active: bool) -> None:
        self.scale, self.active = scale, active
        (bits,) = struct.unpack("<q", struct.pack("<d", scale))
        self.settings.copy_(torch.tensor([bits, int(active)]))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        settings = state.get(prefix + "settings")
        if settings is not None and settings.device.type != "meta":
            bits, active = settings.tolist()
            (scale,) = struct.unpack("<d", struct.pack("<q", bits))
            self.set(scale, bool(active))


class SALRLinear(nn.Module):
    """y = x W_hat^T + (x A_cat^T) B_cat^T + bias, W_hat pruned and held in the bitmap format of `encoding`.

    A_cat and B_cat hold the residual adapter and the active task adapters one after the other, each with its scale, so
    that all of them cost one pair of products. W_hat never trains; the residual adapter (`train_residual`), the task
    adapters and x take gradients; the bias takes one when asked to. Built by `from_linear`, or by
    `simkit.kernels.convert`.

    Shapes: x [..., in_features] -> [..., out_features]. dtypes: fp32, bf16, fp16 (fast paths), fp64 (reference).
    """

    bits: Tensor
    values: Tensor
    offsets: Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None, dtype: Any = None
    ) -> None:
        """An empty layer (W_hat = 0, no adapters), the place into which a state may be loaded."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        dtype = dtype or torch.get_default_dtype()
        words, groups = -(-in_features // WORD), -(-out_features // GROUP)
        self.register_buffer("bits", torch.zeros(groups, words, GROUP, dtype=torch.int64, device=device))
        self.register_buffer("values", torch.zeros(PAD, dtype=dtype, device=device))
        self.register_buffer("offsets", torch.zeros(groups + 1, dtype=torch.int64, device=device))
        self.register_buffer("quant_scales", None)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), False) if bias else None
        self.residual_a = nn.Parameter(torch.zeros(0, in_features, device=device, dtype=dtype))
        self.residual_b = nn.Parameter(torch.zeros(out_features, 0, device=device, dtype=dtype))
        self.adapters = nn.ModuleDict()
        self._joined: tuple[Any, Tensor, Tensor] | None = None
        self._advised = 0

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        sparsity: float | str = 0.5,
        rank: int = 16,
        alpha: float | None = None,
        *,
        scope: str = "matrix",
        residual_rank: int | None = None,
        train_residual: bool = True,
        quant: str = "none",
        keep: Tensor | None = None,
        adapter: str = "default",
    ) -> SALRLinear:
        """Prunes, encodes and adds both adapters.

        `sparsity` and `scope` as in `masks.magnitude_mask`, or the mask itself as `keep`. `residual_rank` (default:
        `rank`) is that of the truncated SVD of what was cut. The task adapter `adapter` of rank `rank` has the scale
        alpha / rank (2 without alpha); rank 0 leaves it out. `quant` holds the kept values in ``int8`` or
        ``nf4``; what quantisation loses goes to the residual adapter too. Raises InputError for a rank that the matrix
        has not.
        """
        weight = linear.weight.detach()
        keep = magnitude_mask(weight, sparsity, scope) if keep is None else keep
        layer = cls(linear.in_features, linear.out_features, False, device=weight.device, dtype=weight.dtype)
        encoded = encode(weight, keep)
        layer.bits, layer.offsets = encoded.bits, encoded.offsets
        packed = pack(encoded.values, quant)
        layer.values, layer.quant_scales = packed.values, packed.scales
        residual_rank = min(rank, *weight.shape) if residual_rank is None else residual_rank
        if not 0 <= residual_rank <= min(weight.shape):
            hint = f"at most {min(weight.shape)}, the smaller side of the matrix"
            raise InputError("is no rank of this layer", key="residual_rank", value=residual_rank, hint=hint)
        if residual_rank:
            wide = weight if weight.dtype == torch.float64 else weight.float()
            a, b = truncated_svd(wide - layer.base_weight().to(wide.dtype), residual_rank)
            layer.residual_a = nn.Parameter(a.to(weight.dtype))
            layer.residual_b = nn.Parameter(b.to(weight.dtype))
        layer.train_residual(train_residual)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        if rank:
            layer.add_adapter(adapter, rank, alpha)
        return layer.train(linear.training)

    def train_residual(self, on: bool = True) -> SALRLinear:
        """Whether the residual adapter takes gradients."""
        self.residual_a.requires_grad_(on)
        self.residual_b.requires_grad_(on)
        return self

    # -- task adapters --

    def add_adapter(self, name: str, rank: int, alpha: float | None = None, scale: float | None = None) -> Adapter:
        """A new active adapter: B = 0, so that nothing changes yet. Its scale is alpha / rank unless given."""
        if name in self.adapters:
            raise InputError(
                "is an adapter already", key="adapter", value=name, hint="remove it or choose another name"
            )
        if rank < 1 or "." in name:
            raise InputError("is no rank" if rank < 1 else "has a dot", key="adapter", value=rank if rank < 1 else name)
        factor = scale if scale is not None else DEFAULT_SCALE if alpha is None else alpha / rank
        device, dtype = self.residual_a.device, self.residual_a.dtype
        self.adapters[name] = Adapter(
            rank, self.in_features, self.out_features, factor, device=device, dtype=dtype
        ).train(self.training)
        self._joined = None
        return self.adapters[name]  # type: ignore[return-value]

    def remove_adapter(self, name: str) -> None:
        self._known(name)
        del self.adapters[name]
        self._joined = None

    def set_adapters(self, *names: str) -> None:
        """Makes exactly these active; none at all leaves the residual adapter alone."""
        for name in names:
            self._known(name)
        for name, adapter in self.adapters.items():
            adapter.set(adapter.scale, name in names)
        self._joined = None

    @property
    def active_adapters(self) -> tuple[str, ...]:
        return tuple(name for name, adapter in self.adapters.items() if adapter.active)

    def _known(self, name: str) -> None:
        if name not in self.adapters:
            raise unknown("adapter", name, list(self.adapters))

    def joined(self) -> tuple[Tensor, Tensor]:
        """(A_cat [R, in], B_cat [out, R]) of the residual and the active adapters, kept between calls that train
        nothing."""
        pairs = [adapter for adapter in self.adapters.values() if adapter.active]
        parameters = [self.residual_a, self.residual_b, *(p for pair in pairs for p in (pair.lora_a, pair.lora_b))]
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return self._join(pairs)
        key = tuple((id(p), p._version, p.data_ptr()) for p in parameters), tuple(p.scale for p in pairs)
        if self._joined is None or self._joined[0] != key:
            self._joined = (key, *(t.contiguous() for t in self._join(pairs)))
        return self._joined[1], self._joined[2]

    def _join(self, pairs: list[Any]) -> tuple[Tensor, Tensor]:
        if not pairs:
            return self.residual_a, self.residual_b
        scaled = [p.lora_b * p.scale for p in pairs]
        return torch.cat([self.residual_a, *(p.lora_a for p in pairs)]), torch.cat([self.residual_b, *scaled], dim=1)

    # -- products --

    def plain_values(self) -> Tensor:
        """The kept values in the layer's dtype, dequantised where they are held in fewer bits."""
        return unpack(Packed(self.values, self.quant_scales), self.residual_a.dtype)

    def base_weight(self) -> Tensor:
        """W_hat, dense [out, in]."""
        return ops.dense(self.bits, self.plain_values(), self.offsets, self.out_features, self.in_features)

    @property
    def weight(self) -> Tensor:
        """W_hat with every active adapter, dense: what code that reads a layer's weight means. Computed at each
        access."""
        a, b = self.joined()
        wide = torch.float64 if self.residual_a.dtype == torch.float64 else torch.float32
        return (self.base_weight().to(wide) + b.to(wide) @ a.to(wide)).to(self.residual_a.dtype)

    def forward(self, x: Tensor) -> Tensor:
        given, own = x.dtype, self.residual_a.dtype
        if given != own:
            if not torch.is_autocast_enabled(x.device.type):
                raise RuntimeError(f"the input is {given}, the layer {own}")
            x = x.to(own)  # the encoded weight stays as it is: casting it at each call would cost what it saves
            given = torch.get_autocast_dtype(x.device.type)
        a, b = self.joined()
        flat = x.reshape(-1, self.in_features)
        arguments = (flat, self.bits, self.plain_values(), self.offsets, a, b, self.bias, self.out_features)
        watched = (x, a, b) if self.bias is None else (x, a, b, self.bias)
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in watched)):
            y = ops.salr_linear(*arguments)
        else:
            if self._advised != self.values.data_ptr() and x.device.type == "cpu":
                native.huge(self.bits, self.values)
                self._advised = self.values.data_ptr()
            # The dispatcher costs as much as a small product; without gradients it has nothing to do.
            y = ops.run(*arguments)
        return y.reshape(*x.shape[:-1], self.out_features).to(given)

    def merge(self) -> nn.Linear:
        """A dense ``nn.Linear`` of the same function, active adapters folded in."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight.detach().clone())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear.train(self.training)

    # -- state --

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes the shapes that the state has: how many values a mask keeps, and which adapters there are, is data."""
        for name in ("values", "quant_scales"):
            new, old = state.get(prefix + name), getattr(self, name)
            if new is not None and (old is None or old.shape != new.shape or old.dtype != new.dtype):
                device = self.bits.device
                setattr(self, name, torch.empty(new.shape, dtype=new.dtype, device=device))
        for name in ("residual_a", "residual_b"):
            new, old = state.get(prefix + name), getattr(self, name)
            if new is not None and old.shape != new.shape and old.ndim == new.ndim:
                fresh = torch.empty(new.shape, dtype=old.dtype, device=old.device)
                setattr(self, name, nn.Parameter(fresh, requires_grad=old.requires_grad))
        for key, new in state.items():
            head, _, leaf = key.rpartition(".")
            if leaf == "lora_a" and head.startswith(f"{prefix}adapters."):
                name = head[len(prefix) + len("adapters.") :]
                if name in self.adapters and self.adapters[name].lora_a.shape != new.shape:
                    self.remove_adapter(name)
                if name not in self.adapters:
                    self.add_adapter(name, new.shape[0])
        self._joined = None
        super()._load_from_state_dict(state, prefix, *rest)

    def extra_repr(self) -> str:
        kept = int(self.offsets[-1]) if self.offsets.device.type != "meta" else 0
        density = kept / max(1, self.in_features * self.out_features)
        ranks = {"residual": self.residual_a.shape[0], **{n: a.lora_a.shape[0] for n, a in self.adapters.items()}}
        shape = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{shape}, density={density:.3f}, ranks={ranks}"

    def nbytes(self) -> dict[str, int]:
        """{"base": bytes of the encoded weight, "adapters": of all low-rank pairs, "dense": of W in the layer's
        dtype}."""
        base = [self.bits, self.values, self.offsets, *([self.quant_scales] if self.quant_scales is not None else [])]
        pairs = [self.residual_a, self.residual_b, *(p for a in self.adapters.values() for p in (a.lora_a, a.lora_b))]
        size = [sum(t.numel() * t.element_size() for t in tensors) for tensors in (base, pairs)]
        dense = self.in_features * self.out_features * self.residual_a.element_size()
        return {"base": size[0], "adapters": size[1], "dense": dense}
