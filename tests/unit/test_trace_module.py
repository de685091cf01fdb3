"""Traced networks against hand formulas and against the same network written down operator by operator."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from simkit.count import count, flops_per_sample
from simkit.errors import InputError
from simkit.program import basis
from simkit.spec.model import Model, TracedSpec
from simkit.spec.models import model
from simkit.workloads import Numerics, program

torch = pytest.importorskip("torch", reason="tracing needs torch")

NETS = '''
import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample = None
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        for i in range(4):
            stride = 1 if i == 0 else 2
            blocks = BasicBlock(widths[i], widths[i + 1], stride), BasicBlock(widths[i + 1], widths[i + 1], 1)
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(512, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def encoder_layer():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, q):
        return F.scaled_dot_product_attention(q * self.scale, q, q)

    def example_inputs(self, batch):
        return torch.empty(batch, 12, 64, 64)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Linear(7, 7)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Keywords(nn.Module):
    simkit_input = {"a": torch.empty(5, 10), "b": torch.empty(5, 10)}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 3)

    def forward(self, a, b):
        return self.linear(a + b)


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x):
        return self.up(self.conv(x))

    def example_inputs(self, batch):
        return torch.empty(batch, 8, 16, 16)


class Peeks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x if self.linear(x).sum().item() > 0 else -x


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.shape[0] < 3 else self.linear(x).relu()


def loud():
    print("this must not reach stdout")
    return nn.Linear(4, 4)


def fails():
    raise RuntimeError("no weights here")


def needs(argument):
    return nn.Linear(4, 4)


def number():
    return 3


constant = 3


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return self.head(self.linear(x))


def tied_on_cpu():
    with torch.device("cpu"):
        return Tied()
'''


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("nets")
    (folder / "traced_nets.py").write_text(textwrap.dedent(NETS))
    (folder / "broken_nets.py").write_text("import nothing_of_that_name\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def traced(name: str) -> Model:
    net = model(f"traced_nets:{name}")
    assert isinstance(net.spec, TracedSpec)
    return net


def ops(net: Model, kind: str) -> list[Any]:
    assert isinstance(net.spec, TracedSpec)
    return [op for op in net.spec.ops if op.kind == kind]


def test_resnet_18_equals_the_network_written_down(nets: Path) -> None:
    net, known = traced("ResNet18"), model("resnet-18")
    assert net.params == 11689512
    assert [t.shape for t in net.tensors] == [t.shape for t in known.tensors]
    assert flops_per_sample(net) == flops_per_sample(known)
    assert flops_per_sample(net) / 2e9 == pytest.approx(1.81, abs=0.005)  # torchvision prints 1.81 GMAC
    assert net.input_kind == "images"
    assert len(ops(net, "conv")) == 20


def test_encoder_layer_by_hand(nets: Path) -> None:
    """S = 128, d = 64, f = 128: 2·S(3d² + d² + 2df) + 4·S²·d."""
    net = traced("encoder_layer")
    s, d, f = 128, 64, 128
    assert flops_per_sample(net) == 2 * s * (4 * d * d + 2 * d * f) + 4 * s * s * d
    assert len(ops(net, "attention")) == 1
    assert net.params == 4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d


def test_fused_attention_counts_as_published(nets: Path) -> None:
    """BR-65: q of (1, 12, 64, 64): 4·B·H·S²·D = 12582912."""
    net = traced("Attention")
    assert flops_per_sample(net) == 12582912
    (op,) = ops(net, "attention")
    assert (op.batch, op.m, op.n, op.scales) == (12, 64, 64, "batch")


def test_tied_weight_is_one_tensor_used_twice(nets: Path) -> None:
    net = traced("Tied")
    assert net.params == 100 * 32 + 7 * 7 + 7
    users = [op.name for op in net.spec.ops if "embed.weight" in op.tensors]  # type: ignore[union-attr]
    assert users == ["embed.embedding", "head.mm"]
    assert net.input_kind == "tokens"
    assert net.default_seq_len == 128


def test_networks_that_ask_for_their_device_are_traced(nets: Path) -> None:
    """Autocast refuses the meta device, as in the rotary embeddings of public Llama code."""
    net = traced("Autocast")
    assert flops_per_sample(net) == 2 * 128 * (16 * 16 + 16 * 50)
    assert net.params == 50 * 16 + 16 * 16 + 16
    assert {t for op in net.spec.ops for t in op.tensors} == {t.name for t in net.tensors}  # type: ignore[union-attr]


def test_ties_survive_the_move_to_the_meta_device(nets: Path) -> None:
    assert traced("tied_on_cpu").params == traced("Tied").params


def test_a_lookup_moves_rows_not_the_table(nets: Path) -> None:
    lookup = next(op for op in traced("Tied").spec.ops if op.name == "embed.embedding")  # type: ignore[union-attr]
    assert lookup.read_elements == lookup.write_elements == 128 * 32


def test_every_tensor_is_some_operators(nets: Path) -> None:
    for name in ("ResNet18", "encoder_layer", "Tied", "Keywords", "Depthwise"):
        net = traced(name)
        used = {t for op in net.spec.ops for t in op.tensors}  # type: ignore[union-attr]
        assert used == {t.name for t in net.tensors}, name
    assert any("no part" in note for note in traced("Tied").notes)


def test_weights_do_not_grow_with_the_batch(nets: Path) -> None:
    (op,) = ops(traced("Keywords"), "gemm")
    assert (op.m, op.n, op.k, op.scales) == (1, 3, 10, "m")
    assert (op.read_elements, op.write_elements, op.fixed_elements) == (10, 3, 33)


def test_grouped_and_transposed_convolutions(nets: Path) -> None:
    # Depthwise: 256 positions x 8 channels x 9; transposed 2x2, stride 2: each of 256 inputs meets 8·4·4 weights.
    net = traced("Depthwise")
    assert flops_per_sample(net) == 2 * 256 * 8 * 9 + 2 * 256 * 8 * 4 * 4


def test_operators_that_depend_on_the_batch_are_noted(nets: Path) -> None:
    assert any("depend on the batch" in note for note in traced("Branches").notes)
    assert flops_per_sample(traced("Branches")) == 2 * 4 * 4


def test_prints_of_a_module_stay_off_stdout(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced("loud")
    assert capsys.readouterr().out == ""


def test_functional_is_left_as_it_was(nets: Path) -> None:
    before = torch.nn.functional.scaled_dot_product_attention
    model.__globals__["_from_callable"].cache_clear()
    traced("Attention")
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_workload_of_a_trace_agrees_with_the_network_written_down(nets: Path) -> None:
    """ResNet-18 both ways: the same FLOPs, the same gradients in the same order, the same activations."""
    numerics = Numerics(element_bytes=4.0)
    a, b = program(traced("ResNet18"), numerics), program(model("resnet-18"), numerics)
    monomials = basis(64, 0)
    assert a.model_flops @ monomials == b.model_flops @ monomials
    assert list(a.tensor_index) == list(b.tensor_index)
    saved = [float((p.forward.at(monomials)[1] * p.forward.counts).sum()) for p in (a, b)]
    assert saved[0] == pytest.approx(saved[1], rel=0.01)
    rows = [p.backward.at(monomials)[0] for p in (a, b)]
    flops = [
        float((2 * r.batch * r.m * r.n * r.k * p.backward.counts).sum()) for r, p in zip(rows, (a, b), strict=True)
    ]
    assert flops[0] == pytest.approx(flops[1], rel=0.01)


def test_counts_of_a_traced_network(nets: Path) -> None:
    found = count(traced("ResNet18"))
    assert found["params"] == 11689512
    assert found["flops_per_sample_forward"] == flops_per_sample(model("resnet-18"))
    assert "flops_per_token_forward" not in found
    assert found["buffers"]


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("traced_nets:ResNet81", "ResNet18"),
        ("no_such_module:Net", "cannot be imported"),
        ("broken_nets:Net", "nothing_of_that_name"),
        ("traced_nets:fails", "no weights here"),
        ("traced_nets:needs", "without arguments"),
        ("traced_nets:number", "not an nn.Module"),
        ("traced_nets:constant", "not callable"),
        ("traced_nets:Peeks", "example_inputs"),
    ],
)
def test_bad_targets_are_one_line(nets: Path, target: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        model(target)
    assert "\n" not in caught.value.line()


def test_missing_torch_names_the_extra(nets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simkit.spec.trace_module import from_callable

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"simkit-perf\[kernels\]"):
        from_callable("traced_nets:ResNet18")
