"""`SALRLinear` and its operators: against plain torch, through autograd, the compiler, and files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from simkit.errors import InputError  # noqa: E402
from simkit.kernels import SALRLinear, add_peft, convert, merge  # noqa: E402
from simkit.kernels.salr import native, ops, parameter_groups, reference, residual_steps  # noqa: E402
from simkit.kernels.salr.encoding import encode, formula_bytes  # noqa: E402
from simkit.kernels.salr.masks import magnitude_mask  # noqa: E402

EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative error (2-norm) allowed against fp64: one rounding of the result, and what fp32 sums of 1000 terms lose."""
SHAPES = [  # M, N, K, R: one row to prefill, ragged groups (4), words (64), panels (16, 64), blocks (6, 12, 252)
    (1, 64, 128, 0),
    (1, 70, 200, 5),
    (2, 33, 65, 16),
    (3, 5, 7, 3),
    (4, 130, 513, 32),
    (7, 64, 256, 32),
    (13, 200, 1000, 40),
    (64, 67, 333, 16),
    (300, 130, 256, 300),
    (1, 1, 1, 1),
]
built = pytest.mark.skipif(native.isa() in ("none", "portable"), reason="no native kernels for this CPU were built")


def made(n: int, k: int, r: int, dtype: torch.dtype, sparsity: float = 0.5) -> tuple:
    """(bits, values, offsets, A, B, bias) of a random layer."""
    torch.manual_seed(n * 1009 + k)
    w = torch.randn(n, k).to(dtype)
    e = encode(w, magnitude_mask(w, sparsity))
    a, b = (torch.randn(r, k) / math.sqrt(k)).to(dtype), torch.randn(n, r).to(dtype)
    return e.bits, e.values, e.offsets, a, b, torch.randn(n).to(dtype)


def exact(
    x: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, a: Tensor, b: Tensor, bias: Tensor | None
) -> Tensor:
    wide = None if bias is None else bias.double()
    return reference.salr_linear(x.double(), bits, values.double(), a.double(), b.double(), wide, b.shape[0])


def error(y: Tensor, right: Tensor) -> float:
    return float((y.double() - right).norm() / right.norm().clamp_min(1e-30))


@built
@pytest.mark.parametrize("isa", ["", "avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
def test_native_equals_the_reference(dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa and native.ISAS[isa] > native.ISAS[native.isa()]:
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("SIMKIT_SALR_ISA", isa)
    for m, n, k, r in SHAPES:
        layer, x = made(n, k, r, dtype), torch.randn(m, k).to(dtype)
        assert error(native.linear(x, *layer, n), exact(x, *layer)) < EPSILON[dtype], (m, n, k, r)
        bits, values, offsets = layer[:3]
        assert torch.equal(native.decode(bits, values, offsets, n, k), reference.decode(bits, values, n, k))


@built
@pytest.mark.parametrize("dtype", list(EPSILON), ids=str)
@pytest.mark.parametrize("what", ["zero", "dense", "empty rows", "one per row"])
def test_extreme_masks(dtype: torch.dtype, what: str) -> None:
    n, k = 75, 300
    torch.manual_seed(3)
    w = torch.randn(n, k).to(dtype)
    keep = torch.rand(n, k) < 0.5
    if what in ("zero", "dense"):
        keep[:] = what == "dense"
    elif what == "empty rows":
        keep[::3] = False
    else:
        keep[:] = False
        keep[torch.arange(n), torch.arange(n) * 3] = True
    e = encode(w, keep)
    for m in (1, 2, 9):
        x = torch.randn(m, k).to(dtype)
        y = native.linear(x, e.bits, e.values, e.offsets, w[:0], w[:, :0].contiguous(), None, n)
        right = x.double() @ (w.double() * keep).t()
        assert float((y.double() - right).norm()) <= EPSILON[dtype] * max(float(right.norm()), 1e-30)


def test_a_half_precision_result_is_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        layer, x = made(40, 1000, 8, dtype), torch.randn(5, 1000).to(dtype)
        right = exact(x, *layer)
        step = (right.to(dtype).double() - right).abs()
        y = ops.run(x, *layer, 40).double()
        assert bool(((y - right).abs() <= 1.02 * step.clamp_min(EPSILON[dtype] * right.abs() / 2) + 1e-4).all())


def test_portable_decoding_equals_the_reference() -> None:
    if native.library() is None:
        pytest.skip("no native kernels were built")
    bits, values, offsets, *_ = made(11, 130, 0, torch.float32)
    out = torch.empty(11, 130)
    status = native.library().salr_decode(
        4, 0, bits.data_ptr(), values.data_ptr(), offsets.data_ptr(), 11, 130, out.data_ptr(), 2
    )
    assert status == 0
    assert torch.equal(out, reference.decode(bits, values, 11, 130))


def test_the_layer_is_pruned_base_plus_adapters() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 80)
    layer = SALRLinear.from_linear(linear, 0.5, rank=4, alpha=8, residual_rank=6)
    w = linear.weight.detach()
    keep = magnitude_mask(w, 0.5)
    u, s, vt = torch.linalg.svd(w * ~keep)
    rank6 = (u[:, :6] * s[:6]) @ vt[:6]
    torch.testing.assert_close(layer.base_weight(), w * keep)
    torch.testing.assert_close(layer.weight, w * keep + rank6, atol=1e-5, rtol=1e-4)
    adapter = layer.adapters["default"]
    with torch.no_grad():
        adapter.lora_b.normal_()
    x = torch.randn(3, 5, 96)
    right = x @ (w * keep + rank6).t() + 2.0 * (x @ adapter.lora_a.t()) @ adapter.lora_b.t() + linear.bias
    torch.testing.assert_close(layer(x), right, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.merge()(x), right, atol=1e-4, rtol=1e-4)
    transposed = torch.randn(96, 7).t()
    with torch.no_grad():
        torch.testing.assert_close(layer(transposed), layer(transposed.contiguous()))
        torch.testing.assert_close(layer(transposed[::2]), layer(transposed)[::2])
        assert layer(torch.empty(0, 96)).shape == (0, 80)


def test_adapters_come_and_go() -> None:
    torch.manual_seed(0)
    layer, x = SALRLinear.from_linear(nn.Linear(64, 64, bias=False), rank=0, residual_rank=2), torch.randn(4, 64)
    base = layer(x)
    pairs = {}
    for name, rank in (("math", 3), ("code", 5)):
        pair = layer.add_adapter(name, rank, alpha=6)
        torch.testing.assert_close(layer(x), base if name == "math" else layer(x))
        with torch.no_grad():
            pair.lora_b.normal_()
        pairs[name] = 6 / rank * (x @ pair.lora_a.t()) @ pair.lora_b.t()
    torch.testing.assert_close(layer(x), base + pairs["math"] + pairs["code"], atol=1e-5, rtol=1e-4)
    assert layer.joined()[0].shape == (10, 64), "one concatenated product"
    layer.set_adapters("code")
    with torch.no_grad():
        torch.testing.assert_close(layer(x), base + pairs["code"], atol=1e-5, rtol=1e-4)
        layer.adapters["code"].lora_b.mul_(2)
        torch.testing.assert_close(layer(x), base + 2 * pairs["code"], atol=1e-5, rtol=1e-4)
    layer.set_adapters()
    torch.testing.assert_close(layer(x), base)
    layer.remove_adapter("math")
    assert set(layer.adapters) == {"code"}
    with pytest.raises(InputError, match="'code'"):
        layer.set_adapters("cod")
    with pytest.raises(InputError, match="already"):
        layer.add_adapter("code", 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_reach_everything_but_the_base(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = SALRLinear.from_linear(nn.Linear(70, 37, dtype=dtype), rank=3, alpha=3, residual_rank=4)
    layer.bias.requires_grad_(True)
    with torch.no_grad():
        layer.adapters["default"].lora_b.normal_()
    x = torch.randn(2, 6, 70, dtype=dtype, requires_grad=True)
    names = ["residual_a", "residual_b", "adapters.default.lora_a", "adapters.default.lora_b", "bias"]
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == set(names)
    parameters = [dict(layer.named_parameters())[n] for n in names]
    seed = torch.randn(2, 6, 37, dtype=dtype)
    found = torch.autograd.grad((layer(x) * seed).sum(), [x, *parameters])
    w = layer.base_weight().clone().requires_grad_(True)
    a2, b2, a1, b1, bias = parameters
    right = torch.autograd.grad(
        ((x @ w.t() + x @ a2.t() @ b2.t() + x @ a1.t() @ b1.t() + bias) * seed).sum(), [x, *parameters]
    )
    for f, r in zip(found, right, strict=True):
        torch.testing.assert_close(f, r, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=1e-4)
    assert not any(n in dict(layer.named_parameters()) for n in ("values", "weight"))


def test_gradcheck() -> None:
    layer = made(9, 20, 3, torch.float64)
    x = torch.randn(4, 20, dtype=torch.float64, requires_grad=True)
    bits, values, offsets, a, b, bias = layer
    a, b, bias = (t.double().requires_grad_(True) for t in (a, b, bias))
    values = values.double()
    assert torch.autograd.gradcheck(lambda *t: ops.salr_linear(t[0], bits, values, offsets, *t[1:], 9), (x, a, b, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    bits, values, offsets, a, b, bias = made(12, 70, 4, dtype)
    a, b = a.requires_grad_(True), b.requires_grad_(True)
    x = torch.randn(3, 70).to(dtype).requires_grad_(True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.salr_linear, (x, bits, values, offsets, a, b, bias, 12), test_utils=tests)
    torch.library.opcheck(ops.salr_linear, (x, bits, values, offsets, a, b, None, 12), test_utils=tests)
    torch.library.opcheck(ops.salr_input_gradient, (torch.randn(3, 12).to(dtype), bits, values, offsets, 70))


def test_torch_compile_sees_one_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 40), nn.GELU(), nn.Linear(40, 10))
    model = convert(model, rank=4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 70)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
    compiled(x).sum().backward()
    got = model[0].residual_a.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, model[0].residual_a.grad, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)


def small() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(72, 90), "down": nn.Linear(90, 40, bias=False)})


@pytest.mark.parametrize("options", [{}, {"quant": "nf4"}, {"quant": "int8"}, {"sparsity": "2:4"}, {"scope": "global"}])
def test_a_state_goes_through_a_file(options: dict, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    model = convert(small(), rank=3, **options)
    for layer in model.values():
        layer.add_adapter("extra", 2, scale=0.3)
        layer.set_adapters("extra")
        with torch.no_grad():
            layer.adapters["extra"].lora_b.normal_()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(9)
    other = convert(small(), rank=3, empty=True)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    x = torch.randn(3, 72)
    for name, width in (("up", 72), ("down", 90)):
        x = torch.randn(3, width)
        assert torch.equal(other[name](x), model[name](x))
        assert other[name].active_adapters == ("extra",)
        assert other[name].adapters["extra"].scale == 0.3
    again = convert(small(), rank=5, sparsity=0.2)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again["up"](torch.ones(1, 72)), model["up"](torch.ones(1, 72))), "into other ranks and sizes"


def test_a_change_of_dtype_keeps_the_scale() -> None:
    layer = convert(nn.Linear(64, 32), rank=3, alpha=1).to(torch.bfloat16)
    assert layer.adapters["default"].scale == 1 / 3
    assert layer(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="float32"):
        layer(torch.ones(2, 64))
    with torch.autocast("cpu", torch.bfloat16):
        assert convert(nn.Linear(64, 32), rank=3)(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_global_mask_over_a_model() -> None:
    torch.manual_seed(0)
    model = small()
    with torch.no_grad():
        model["down"].weight.mul_(10)
    new = convert(model, rank=2, sparsity=0.5, scope="global")
    kept = {n: int(layer.offsets[-1]) for n, layer in new.items()}
    assert sum(kept.values()) == (72 * 90 + 90 * 40) - round(0.5 * (72 * 90 + 90 * 40))
    assert kept["down"] > 0.9 * 90 * 40, "the larger weights stay"


def test_convert_and_merge_a_model_with_conv1d() -> None:
    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(40, 30), nn.ReLU(), nn.Linear(40, 20)), torch.randn(4, 30)
    whole = convert(model, sparsity=0.0, rank=4, residual_rank=0)
    torch.testing.assert_close(whole(x), model(x), atol=1e-4, rtol=1e-4)
    half = convert(model, sparsity=0.5, rank=4, residual_rank=20)
    torch.testing.assert_close(merge(half)(x), half(x), atol=1e-4, rtol=1e-4)
    assert isinstance(merge(half)[0], nn.Linear)


def test_an_encoder_layer_of_torch_in_its_fast_path() -> None:
    """`nn.TransformerEncoderLayer` reads `linear1.weight` in inference: it must find the whole layer there."""
    torch.manual_seed(0)
    model = convert(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), rank=4).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(fast, model(x), atol=1e-5, rtol=1e-4)


def peft_folder(folder: Path, shapes: dict[str, tuple[int, int]], **config: object) -> dict[str, tuple[Tensor, Tensor]]:
    """A LoRA checkpoint as PEFT's save_pretrained lays it out."""
    from safetensors.torch import save_file

    torch.manual_seed(8)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "target_modules": sorted(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    pairs = {n: (torch.randn(4, k), torch.randn(m, 4)) for n, (m, k) in shapes.items()}
    tensors = {}
    for n, (a, b) in pairs.items():
        tensors[f"base_model.model.{n}.lora_A.weight"], tensors[f"base_model.model.{n}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors")
    return pairs


@pytest.mark.parametrize(
    ("config", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"up": 2}}, 0.5)]
)
def test_a_peft_checkpoint(config: dict, scale: float, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    pairs = peft_folder(tmp_path, {"up": (90, 72)}, **config)
    model, x = convert(small(), rank=0, residual_rank=3), torch.randn(3, 72)
    before = model["up"](x)
    assert add_peft(model, tmp_path, "task") == ["up"]
    a, b = pairs["up"]
    torch.testing.assert_close(model["up"](x), before + scale * (x @ a.t()) @ b.t(), atol=1e-3, rtol=1e-4)
    add_peft(model, tmp_path, "task")
    assert model["up"].active_adapters == ("task",), "loaded twice is there once"


def test_a_peft_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = convert(small(), rank=0)
    with pytest.raises(InputError, match="adapter_config"):
        add_peft(model, tmp_path)
    peft_folder(tmp_path, {"upp": (90, 72)})
    with pytest.raises(InputError, match="'up'"):
        add_peft(model, tmp_path)
    peft_folder(tmp_path, {"up": (90, 71)})
    with pytest.raises(InputError, match="71"):
        add_peft(model, tmp_path)
    peft_folder(tmp_path, {"up": (90, 72)}, peft_type="IA3")
    with pytest.raises(InputError, match="IA3"):
        add_peft(model, tmp_path)
    assert not model["up"].adapters


def test_the_step_of_each_layer_and_its_group() -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 8)), rank=2)
    x = torch.randn(50, 20)
    steps = residual_steps(model, x)
    hidden = torch.relu(model[0](x))
    assert steps["0"] == pytest.approx(1 / float(torch.linalg.matrix_norm(x, 2)) ** 2, rel=0.01)
    assert steps["2"] == pytest.approx(1 / float(torch.linalg.matrix_norm(hidden.detach(), 2)) ** 2, rel=0.01)
    groups = parameter_groups(model, 1e-3, steps)
    assert [g["lr"] for g in groups] == [1e-3, steps["0"], steps["2"]]
    assert sum(len(g["params"]) for g in groups) == 8
    torch.optim.SGD(groups, lr=0.1)
    model[0].train_residual(False)
    assert len(parameter_groups(model, 1e-3, steps)) == 2


def test_it_learns_with_a_frozen_base() -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)), rank=8)
    x, y = torch.randn(128, 32), torch.randn(128, 4)
    values = model[0].values.clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(60):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    assert torch.equal(model[0].values, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_of_a_llama_shaped_model(dtype: torch.dtype) -> None:
    """The layers of Llama-2-7B at a quarter of the width (hidden 1024, MLP 2752), two blocks, rank 16."""
    torch.manual_seed(0)
    h, f, r = 1024, 2752, 16
    shapes = {"q": (h, h), "k": (h, h), "v": (h, h), "o": (h, h), "gate": (f, h), "up": (f, h), "down": (h, f)}
    block = {n: nn.Linear(k, m, bias=False, dtype=dtype) for n, (m, k) in shapes.items()}
    model = convert(nn.ModuleDict(block), sparsity=0.5, rank=r, residual_rank=0)
    size = {key: sum(layer.nbytes()[key] for layer in model.values()) for key in ("base", "adapters", "dense")}
    weights, s = sum(m * k for m, k in shapes.values()), block["q"].weight.element_size()
    # By hand: half the values, one bit a weight; adapters r (in + out) values a layer.
    assert size["base"] == pytest.approx(weights * (s / 2 + 1 / 8), rel=0.01)
    assert size["adapters"] == r * sum(m + k for m, k in shapes.values()) * s
    exact_bytes = sum(formula_bytes(m, k, m * k - round(0.5 * m * k), s) for m, k in shapes.values())
    assert size["base"] == exact_bytes
    ratio, with_adapters = size["dense"] / size["base"], size["dense"] / (size["base"] + size["adapters"])
    print(f"{dtype}: {ratio:.3f}x smaller, {with_adapters:.3f}x with adapters")
    assert ratio == pytest.approx(16 / 9 if s == 2 else 32 / 17, rel=0.01)
    assert with_adapters < ratio


def test_without_the_library_it_is_slower_and_right() -> None:
    code = (
        "import torch; from torch import nn; from simkit.kernels import convert\n"
        "from simkit.kernels.salr import native\n"
        "assert native.library() is None and not native.available(torch.float32)\n"
        "torch.manual_seed(0); m = nn.Linear(70, 30); n = convert(m, sparsity=0.0, residual_rank=0, rank=2)\n"
        "x = torch.randn(3, 70, requires_grad=True); torch.testing.assert_close(n(x), m(x), atol=1e-5, rtol=1e-5)\n"
        "n(x).sum().backward(); torch.testing.assert_close(x.grad[0], m.weight.sum(0), atol=1e-5, rtol=1e-5)"
    )
    import os

    environment = {**os.environ, "SIMKIT_SALR_LIB": ""}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sparsity": 2.0}, "sparsity"),
        ({"residual_rank": 100}, "residual_rank"),
        ({"quant": "nf5"}, "'nf4'"),
        ({"scope": "columns"}, "scope"),
        ({"sparsity": "2:4", "scope": "global"}, "2:4"),
        ({"sparcity": 0.4}, "'sparsity'"),
    ],
)
def test_bad_options_are_one_line(options: dict, word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        convert(small(), rank=4, **options)
    assert "\n" not in str(caught.value)
