"""LoRA and LoRA-FA layers: what they compute, what autograd keeps for them, what PEFT reads and writes."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from simkit.errors import InputError  # noqa: E402
from simkit.kernels import convert, merge  # noqa: E402
from simkit.kernels.lora import (  # noqa: E402
    AdaptedInput,
    LoRALinear,
    SavedBytes,
    load_peft,
    lora_layers,
    save_peft,
    saved_bytes,
)
from simkit.kernels.lora_fa import LoRAFAAdamW, LoRAFALinear  # noqa: E402

METHODS = ("lora", "lora-fa")
F64 = torch.float64
needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed (extra `kernels`)"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(model: Any, seed: int = 0) -> Any:
    """The model with adapters that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        with torch.no_grad():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) / 10)
    return model


class Block(nn.Module):
    """A pre-norm block: q, k and v read one tensor, attention keeps what o reads."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Any) -> Any:
        b, t, h = x.shape
        y = self.n1(x)
        q, k, v = (p(y).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, h))
        return x + self.down(functional.gelu(self.up(self.n2(x))))


def net(layers: int = 2, hidden: int = 64, ffn: int = 128) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden, 4, ffn) for _ in range(layers)])


def kept(model: Any, x: Any) -> int:
    x = x.clone().requires_grad_(True)
    with SavedBytes(model) as saved:
        y = model(x)
    del y
    return saved.nbytes


# --- what they compute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_sum_of_both_paths(method: str, shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(5, 7, bias=bias)
    layer = drawn(convert(linear, method, rank=3, alpha=6.0))
    x = torch.randn(shape)
    dense = linear.weight + 2.0 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), functional.linear(x, dense, linear.bias))
    merged = merge(layer)
    assert type(merged) is nn.Linear
    torch.testing.assert_close(merged(x), layer(x))


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"),
    [(4, 8.0, False, 2.0), (16, 8.0, True, 2.0), (4, None, False, 2.0), (9, None, True, 2.0), (64, 16.0, False, 0.25)],
)
def test_scale(rank: int, alpha: float | None, rslora: bool, scale: float) -> None:
    for kind in (LoRALinear, LoRAFALinear):
        layer = kind(nn.Linear(64, 8), rank, alpha, rslora=rslora)
        assert layer.scale == pytest.approx(scale)
        assert layer.alpha == pytest.approx(scale * (math.sqrt(rank) if rslora else rank))


@pytest.mark.parametrize("method", METHODS)
def test_starts_as_the_base_and_trains_only_the_adapter(method: str) -> None:
    base = net()
    model = convert(base, method, rank=4)
    x = torch.randn(2, 6, 64)
    torch.testing.assert_close(model(x), base(x), rtol=0, atol=1e-6)
    trained = {n.rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == ({"lora_A", "lora_B"} if method == "lora" else {"lora_B"})
    # 6 matrices of a block: 4 of 64 x 64, 64 -> 128, 128 -> 64
    outs, ins = 4 * 64 + 128 + 64, 4 * 64 + 64 + 128
    wide = outs + (ins if method == "lora" else 0)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * 4 * wide


def test_gradients_of_lora_fa_are_those_of_lora_without_a() -> None:
    full = drawn(convert(net(), "lora", rank=4))
    frozen = convert(net(), "lora-fa", rank=4)
    frozen.load_state_dict(full.state_dict())
    grads = []
    for model in (full, frozen):
        x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
        model(x).square().mean().backward()
        grads.append([x.grad, *(layer.lora_B.grad for layer in lora_layers(model).values())])
        assert all((layer.lora_A.grad is None) == (model is frozen) for layer in lora_layers(model).values())
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", METHODS)
def test_gradcheck(method: str) -> None:
    layer = drawn(convert(nn.Linear(5, 7), method, rank=3)).double()
    x = torch.randn(4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    given = layer.lora_B.detach().clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda b: torch.func.functional_call(layer, {"lora_B": b}, (x,)), (given,))


def test_dropout_of_lora_fa_is_one_mask_in_both_directions() -> None:
    layer = LoRAFALinear(nn.Linear(400, 3, bias=False), 400, alpha=400.0, dropout=0.25).double()
    with torch.no_grad():
        layer.base.weight.zero_()
        layer.lora_A.copy_(torch.eye(400))
        layer.lora_B.fill_(1.0)
    x = torch.ones(50, 400, dtype=F64, requires_grad=True)
    torch.manual_seed(3)
    y = layer(x)
    y.sum().backward()
    # Each output is the sum of its row of the mask; the gradient of x is the mask times the number of outputs.
    mask = x.grad / 3
    torch.testing.assert_close(y, mask.sum(1, keepdim=True).expand(50, 3))
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float((mask == 0).double().mean()) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / mask.numel())
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), y)
    assert not torch.equal(layer(x), y)
    layer.eval()
    torch.testing.assert_close(layer(x), torch.full((50, 3), 400.0, dtype=F64))


def test_adapters_of_another_dtype() -> None:
    linear = nn.Linear(16, 8, dtype=torch.bfloat16)
    for method in METHODS:
        layer = drawn(convert(linear, method, rank=4, adapter_dtype=torch.float32))
        x = torch.randn(3, 16, dtype=torch.bfloat16)
        y = layer(x)
        y.sum().backward()
        assert y.dtype == torch.bfloat16
        assert layer.lora_B.grad.dtype == torch.float32
        best = functional.linear(x.float(), linear.weight.float() + layer.delta(), linear.bias.float())
        torch.testing.assert_close(y.float(), best, rtol=2e-2, atol=2e-2)


def test_compiles_in_one_graph() -> None:
    for method in METHODS:
        model = drawn(convert(net(1), method, rank=4, dropout=0.0))
        x = torch.randn(2, 6, 64)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("key", "value"), [("rank", 0), ("alpha", 0.0), ("alpha", -1.0), ("dropout", 1.0), ("dropout", -0.1)]
)
def test_bad_settings_are_named(key: str, value: float) -> None:
    for method in METHODS:
        with pytest.raises(InputError, match=key):
            convert(nn.Linear(4, 4), method, **{"rank": 2, key: value})


# --- the corrected gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n", "r"), [(64, 48, 8), (256, 128, 16), (33, 7, 1), (40, 5, 40), (512, 64, 64)])
@pytest.mark.parametrize("rslora", [False, True])
def test_correction_is_the_least_squares_solution(k: int, n: int, r: int, rslora: bool) -> None:
    layer = LoRAFALinear(nn.Linear(k, n, dtype=F64), r, alpha=3.0 * r, rslora=rslora)
    g = torch.randn(n, k, dtype=F64, generator=torch.Generator().manual_seed(k))
    got = layer.corrected(layer.scale * g @ layer.lora_A.T)  # autograd's g_B = s G A^T
    best = torch.linalg.lstsq((layer.scale * layer.lora_A).T, g.T).solution.T
    assert (got - best).norm() <= 1e-10 * best.norm()
    # Normal equations: what is left of G is orthogonal to the rows of A.
    assert ((layer.scale * got @ layer.lora_A - g) @ layer.lora_A.T).norm() <= 1e-10 * g.norm()


def test_correction_of_autograd_projects_the_gradient_of_the_dense_layer() -> None:
    linear = nn.Linear(48, 20, dtype=F64)
    layer = drawn(convert(linear, "lora-fa", rank=6, alpha=9.0))
    x, target = torch.randn(30, 48, dtype=F64), torch.randn(30, 20, dtype=F64)
    (layer(x) - target).square().sum().backward()
    dense = merge(layer)
    (dense(x) - target).square().sum().backward()
    a = layer.lora_A
    onto_rows = a.T @ torch.linalg.solve(a @ a.T, a)
    step = layer.scale * layer.corrected(layer.lora_B.grad) @ a
    torch.testing.assert_close(step, dense.weight.grad @ onto_rows, rtol=1e-10, atol=1e-10)


def test_an_a_without_full_rank_gives_the_solution_of_least_norm() -> None:
    layer = LoRAFALinear(nn.Linear(6, 5, dtype=F64), 10, alpha=10.0)
    g = torch.randn(5, 6, dtype=F64)
    best = torch.linalg.pinv(layer.lora_A.T.detach()) @ g.T
    torch.testing.assert_close(layer.corrected(g @ layer.lora_A.T), best.T, rtol=1e-8, atol=1e-8)


def test_the_factor_is_kept_until_a_changes() -> None:
    layer = LoRAFALinear(nn.Linear(32, 8), 4)
    first = layer.gram_inverse()
    assert layer.gram_inverse() is first
    layer.load_state_dict({**layer.state_dict(), "lora_A": torch.randn(4, 32)})
    second = layer.gram_inverse()
    expected = torch.linalg.inv(layer.lora_A.double() @ layer.lora_A.double().T) / layer.scale**2
    torch.testing.assert_close(second, expected)
    torch.testing.assert_close(copy.deepcopy(layer).gram_inverse(), second)


def test_adamw_takes_the_corrected_gradient_and_leaves_that_of_autograd() -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)), "lora-fa", rank=2, freeze=False)
    plain = copy.deepcopy(model)
    ours = LoRAFAAdamW(model, lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01, eps=1e-6, weight_decay=0.1)
    x = torch.randn(5, 12)
    for _ in range(4):
        for m in (model, plain):
            m.zero_grad()
            m(x).square().sum().backward()
        raw = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        for layer in lora_layers(plain).values():
            a = layer.lora_A
            layer.lora_B.grad = layer.lora_B.grad @ torch.linalg.inv(a @ a.T) / layer.scale**2
        ours.step()
        theirs.step()
        for before, p in zip(raw, (p for p in model.parameters() if p.requires_grad), strict=True):
            assert torch.equal(before, p.grad)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    twin = copy.deepcopy(ours)
    twin.load_state_dict(ours.state_dict())
    assert len(twin.state_dict()["state"]) == len(ours.state_dict()["state"]) > 0
    with pytest.raises(InputError, match="lora-fa"):
        LoRAFAAdamW(nn.Linear(3, 3))


# --- what autograd keeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n", "r"), [(1024, 1024, 8), (512, 96, 16), (96, 2048, 4)])
@pytest.mark.parametrize("tokens", [1, 64])
def test_one_layer_keeps_what_the_formula_says(k: int, n: int, r: int, tokens: int) -> None:
    for method, by_hand in (("lora", tokens * 4 * (k + r)), ("lora-fa", tokens * 4 * r)):
        model = convert(nn.Linear(k, n), method, rank=r)
        assert kept(model, torch.randn(tokens, k)) == by_hand
        assert saved_bytes(method, [AdaptedInput(k)], tokens=tokens, rank=r) == by_hand
        half = convert(nn.Linear(k, n, dtype=torch.bfloat16), method, rank=r)
        assert kept(half, torch.randn(tokens, k, dtype=torch.bfloat16)) == by_hand // 2


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("targets", ["all-linear", "q,v", "q,k,v,o", "up,down", "o"])
def test_a_block_keeps_what_the_formula_says_with_shared_inputs_once(rank: int, targets: str) -> None:
    layers, hidden, ffn = 2, 64, 128
    x = torch.randn(2, 16, hidden)
    tokens = 2 * 16
    names = ["q", "k", "v", "o", "up", "down"] if targets == "all-linear" else targets.split(",")
    reads = {"norm1": ("qkv", hidden, False), "attention": ("o", hidden, True)}
    inputs = [
        AdaptedInput(features, sum(c in names for c in group), keep) for group, features, keep in reads.values()
    ]
    inputs += [AdaptedInput(hidden, 1)] * ("up" in names) + [AdaptedInput(ffn, 1)] * ("down" in names)
    inputs = [i for i in inputs if i.linears]
    base = net(layers, hidden, ffn)
    for p in base.parameters():
        p.requires_grad_(False)
    # The frozen net keeps what its norms, attention and GELU need, whatever is adapted.
    frozen = kept(base, x)
    for method in METHODS:
        model = convert(base, method, rank=rank, targets=targets)
        formula = layers * saved_bytes(method, inputs, tokens=tokens, rank=rank)
        assert kept(model, x) - frozen == formula, method


def test_dropout_costs_lora_fa_nothing_and_lora_a_copy_and_a_mask() -> None:
    x = torch.randn(32, 256)
    plain, frozen = (convert(nn.Linear(256, 64), m, rank=8, dropout=0.1).train() for m in METHODS)
    assert kept(frozen, x) == 32 * 4 * 8
    # The dropped input, and the mask that torch keeps on a CPU in the dtype of the input.
    assert kept(plain, x) == 32 * 4 * (256 + 256 + 8)


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(InputError, match="lora-fa"):
        saved_bytes("lora-fb", [], tokens=1, rank=1)


# --- PEFT -------------------------------------------------------------------------------------------------------------


@needs_safetensors
@pytest.mark.parametrize(("method", "back"), list(itertools.product(METHODS, METHODS)))
def test_round_trip(tmp_path: Path, method: str, back: str) -> None:
    base = net()
    model = drawn(convert(base, method, rank=4, alpha=12.0, dropout=0.1, rslora=True)).eval()
    save_peft(model, tmp_path, base_model="some/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "use_rslora": True, "bias": "none"}
    assert expected.items() <= config.items()
    assert "0.q" in config["target_modules"]
    x = torch.randn(2, 6, 64)
    loaded = load_peft(base.eval(), tmp_path, method=back)
    assert {type(m) for m in lora_layers(loaded).values()} == {LoRALinear if back == "lora" else LoRAFALinear}
    assert torch.equal(loaded(x), model(x))
    assert not lora_layers(base), "without inplace the base is left as it was"
    fresh = convert(base, back, rank=4, alpha=12.0, rslora=True)
    torch.testing.assert_close(load_peft(fresh, tmp_path)(x), model(x))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def pair(name: str, r: int, k: int, n: int) -> dict[str, Any]:
    stem = f"base_model.model.{name}"
    return {f"{stem}.lora_A.weight": torch.randn(r, k), f"{stem}.lora_B.weight": torch.randn(n, r)}


@needs_safetensors
def test_ranks_and_alphas_of_single_layers(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"up": 2}, "alpha_pattern": {"1.up": 6}}
    tensors = {**pair("0.q", 4, 64, 64), **pair("0.up", 2, 64, 128), **pair("1.up", 2, 64, 128)}
    layers = lora_layers(load_peft(net(), written(tmp_path, config, tensors)))
    assert {n: (m.rank, m.scale) for n, m in layers.items()} == {"0.q": (4, 2.0), "0.up": (2, 4.0), "1.up": (2, 3.0)}
    torch.testing.assert_close(layers["1.up"].lora_A, tensors["base_model.model.1.up.lora_A.weight"], check_dtype=False)
    again = tmp_path / "again"
    model = load_peft(net(), tmp_path)
    save_peft(model, again)
    x = torch.randn(1, 3, 64)
    assert torch.equal(load_peft(net(), again)(x), model(x))


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


@needs_safetensors
@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"peft_type": "IA3"}, pair("0.q", 4, 64, 64), "peft_type"),
        ({**LORA, "use_dora": True}, pair("0.q", 4, 64, 64), "DoRA"),
        ({**LORA, "bias": "all"}, pair("0.q", 4, 64, 64), "bias"),
        ({**LORA, "lora_alpha": "x"}, pair("0.q", 4, 64, 64), "lora_alpha"),
        (LORA, pair("0.qq", 4, 64, 64), "0.qq"),
        (LORA, pair("0.q", 4, 32, 64), "0.q"),
        (LORA, {"base_model.model.0.q.lora_A.weight": torch.zeros(4, 64)}, "matching pair"),
        (LORA, {"base_model.model.e.lora_embedding_A": torch.zeros(4, 64)}, "lora_embedding_A"),
        (LORA, {}, "no adapter"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, config: dict[str, Any], tensors: Any, says: str) -> None:
    model = net()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(InputError, match=says) as error:
        load_peft(model, written(tmp_path, config, tensors), inplace=True)
    assert "\n" not in str(error.value)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@needs_safetensors
def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="adapter_config"):
        load_peft(net(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match="JSON"):
        load_peft(net(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    with pytest.raises(InputError, match="adapter_model"):
        load_peft(net(), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="safetensors"):
        load_peft(net(), tmp_path)
    with pytest.raises(InputError, match="no LoRA layer"):
        save_peft(net(), tmp_path)
