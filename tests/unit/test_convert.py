"""Does `convert` find the right layers, keep the model's function, and say what was wrong?"""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from simkit.errors import InputError  # noqa: E402
from simkit.kernels import conversion  # noqa: E402
from simkit.kernels.conversion import convert, merge, select  # noqa: E402


class Scaled(nn.Module):
    """The layer of a made-up method: the base times `factor`."""

    def __init__(self, linear: nn.Linear, factor: float) -> None:
        super().__init__()
        self.base, self.factor = linear.requires_grad_(False), factor
        self.adapter = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.factor + self.adapter

    def merge(self) -> nn.Linear:
        return self.base


class Conv1D(nn.Module):
    """Stands in for transformers' class of this name: W is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.c_fc = Conv1D(12, 8)
        self.down = nn.Linear(12, 8)
        self.again = self.down
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = self.down(self.c_fc(self.k_proj(self.q_proj(h))))
        return self.lm_head(self.norm(self.again(torch.cat([h, h[..., :4]], -1))))


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method `scaled` beside the real ones."""
    plugin = types.SimpleNamespace(
        OPTIONS=("factor",),
        replace=lambda linear, *, name, rank, alpha=None, factor=1.0: Scaled(linear, factor),
    )
    real, known = conversion._plugin, conversion.methods()
    monkeypatch.setattr(conversion, "methods", lambda: (*known, "scaled"))
    monkeypatch.setattr(conversion, "_plugin", lambda m: plugin if m == "scaled" else real(m))


def test_all_linear_leaves_the_head_and_finds_conv1d() -> None:
    assert set(select(Model(), "all-linear")) == {"q_proj", "k_proj", "c_fc", "down", "again"}


def test_a_tied_head_is_left_out_by_its_weight_and_by_the_models_word() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(5, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 5, bias=False)})
    model["b"].weight = model["e"].weight
    assert set(select(model, "all-linear")) == {"a"}
    other = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 5)})
    other.get_output_embeddings = lambda: other["b"]
    assert set(select(other, "all-linear")) == {"a"}
    assert set(select(other, ["b"])) == {"b"}, "but it may be named"


def test_attention_that_reads_weights_is_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert set(select(layer, "all-linear")) == {"linear1", "linear2"}


def test_the_copy_is_converted_and_the_original_is_not() -> None:
    model, x = Model(), torch.arange(6).reshape(2, 3)
    before = model(x)
    new = convert(model, "scaled")
    assert torch.equal(model(x), before)
    assert isinstance(model.q_proj, nn.Linear)
    torch.testing.assert_close(new(x), before)
    assert isinstance(new.c_fc, Scaled)
    assert new.again is new.down, "a shared layer stays shared"
    assert convert(model, "scaled", inplace=True) is model
    assert isinstance(model.q_proj, Scaled)


def test_only_adapters_ask_for_gradients() -> None:
    new = convert(Model(), "scaled")
    assert {n.rpartition(".")[2] for n, p in new.named_parameters() if p.requires_grad} == {"adapter"}
    assert convert(Model(), "scaled", freeze=False).norm.weight.requires_grad


def test_targets_are_ends_of_names() -> None:
    model = nn.ModuleDict({"a": Model(), "b": Model()})
    assert set(select(model, "q_proj, b.k_proj")) == {"a.q_proj", "b.q_proj", "b.k_proj"}


def test_merge_undoes_it() -> None:
    model, x = Model(), torch.arange(3)[None]
    back = merge(convert(model, "scaled"))
    assert isinstance(back.c_fc, nn.Linear)
    torch.testing.assert_close(back(x), model(x))


def test_a_single_layer_is_a_model() -> None:
    assert isinstance(convert(nn.Linear(3, 4), "scaled"), Scaled)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"method": "scalde"}, "'scaled'"),
        ({"method": "scaled", "targets": "q_prj"}, "'q_proj'"),
        ({"method": "scaled", "targets": ""}, "targets"),
        ({"method": "scaled", "factr": 2.0}, "'factor'"),
        ({"method": "scaled", "sparsity": 0.3}, "sparsity"),
        ({"method": "scaled", "rank": -1}, "rank"),
        ({"method": "scaled", "rank": 1.5}, "rank"),
    ],
)
def test_bad_input_names_the_way_out_and_changes_nothing(arguments: dict, word: str) -> None:
    model = Model()
    with pytest.raises(InputError, match=word) as caught:
        convert(model, inplace=True, **arguments)
    assert "\n" not in str(caught.value)
    assert isinstance(model.q_proj, nn.Linear)
    assert model.q_proj.weight.requires_grad


def test_torch_is_imported_only_for_a_name() -> None:
    code = (
        "import sys, simkit.kernels as k; assert 'convert' in dir(k); assert 'torch' not in sys.modules\n"
        "import simkit.kernels.conversion\nfrom simkit.kernels import convert; assert callable(convert)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
