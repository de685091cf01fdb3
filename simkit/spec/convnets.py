"""Convolutional networks operator by operator: ResNet (v1.5) and VGG, in torchvision's registration order.

A k x k convolution of stride s and padding k//2 maps a side of h to floor((h + 2 (k//2) - k)/s) + 1. Its weight is
(c_out, c_in/groups, k, k). Batch norm: weight and bias of c; its running statistics (2c + 1 values) are buffers.
Sources: He et al., arXiv 1512.03385; Simonyan and Zisserman, arXiv 1409.1556; the stride of a bottleneck stands in its
3x3 convolution ("v1.5"), as in torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simkit.errors import InputError, unknown
from simkit.spec.model import ConvLayer, ConvSpec, Model, Tensor

RESNETS: Mapping[str, tuple[bool, tuple[int, int, int, int]]] = MappingProxyType({
    "resnet-18": (False, (2, 2, 2, 2)),
    "resnet-34": (False, (3, 4, 6, 3)),
    "resnet-50": (True, (3, 4, 6, 3)),
    "resnet-101": (True, (3, 4, 23, 3)),
    "resnet-152": (True, (3, 8, 36, 3)),
})
"""name: (bottleneck blocks, blocks per stage)"""

VGGS: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType({
    "vgg-11": (1, 1, 2, 2, 2),
    "vgg-13": (2, 2, 2, 2, 2),
    "vgg-16": (2, 2, 3, 3, 3),
    "vgg-19": (2, 2, 4, 4, 4),
})
"""name: 3x3 convolutions per stage; the suffix ``-bn`` adds batch norms"""

IMAGE_SIZE = 224
CLASSES = 1000
VGG_GRID = 7
"""Side that the adaptive pool of VGG leaves to its classifier."""
WIDTHS = (64, 128, 256, 512)


def names() -> tuple[str, ...]:
    """Every network this module builds."""
    return (*RESNETS, *VGGS, *(f"{name}-bn" for name in VGGS))


def build(name: str, *, image_size: int = IMAGE_SIZE) -> Model:
    """The network of that name for square images. Raises InputError naming the nearest one, or for images too small."""
    if image_size < 32:
        raise InputError("is below 32, the stride of the whole network", key="image_size", value=image_size)
    if name in RESNETS:
        return resnet(name, image_size)
    if name.removesuffix("-bn") in VGGS:
        return vgg(name, image_size)
    raise unknown("convolutional network", name, names())


def resized(net: Model, image_size: int) -> Model:
    """The same network at another image size: parameters stay, feature maps change."""
    return build(net.name, image_size=image_size)


class _Net:
    """Collects operators and tensors while the builders walk through a network."""

    def __init__(self, channels: int, side: int) -> None:
        self.image_size = side
        self.layers: list[ConvLayer] = []
        self.tensors: list[Tensor] = []
        self.statistics = 0
        self.c, self.side = channels, side

    def _add(self, op: str, name: str, c_out: int, side: int, *, kernel: int = 1, stride: int = 1,
             params: Mapping[str, tuple[int, ...]] | None = None, module: str = "conv", layer: int = -1) -> None:
        held = [Tensor(f"{name}.{key}", shape, module, layer) for key, shape in (params or {}).items()]
        self.tensors += held
        self.layers.append(ConvLayer(
            op=op, name=name, c_in=self.c, c_out=c_out, kernel=kernel, stride=stride, h_in=self.side, h_out=side,
            w_in=self.side, w_out=side, tensors=tuple(t.name for t in held),
        ))
        self.c, self.side = c_out, side

    def conv(self, name: str, c_out: int, kernel: int, stride: int = 1, *, bias: bool = False, layer: int = -1) -> None:
        side = (self.side + 2 * (kernel // 2) - kernel) // stride + 1
        params: dict[str, tuple[int, ...]] = {"weight": (c_out, self.c, kernel, kernel)}
        if bias:
            params["bias"] = (c_out,)
        self._add("conv", name, c_out, side, kernel=kernel, stride=stride, params=params, layer=layer)

    def bn(self, name: str, layer: int = -1) -> None:
        self.statistics += 2 * self.c + 1
        params = {"weight": (self.c,), "bias": (self.c,)}
        self._add("bn", name, self.c, self.side, params=params, module="norm", layer=layer)

    def pointwise(self, op: str, name: str) -> None:
        self._add(op, name, self.c, self.side)

    def pool(self, op: str, name: str, side: int, *, kernel: int, stride: int) -> None:
        self._add(op, name, self.c, side, kernel=kernel, stride=stride)

    def linear(self, name: str, c_out: int) -> None:
        """Flattens whatever comes before it; its side is 1."""
        self.c, self.side = self.c * self.side * self.side, 1
        self._add("linear", name, c_out, 1, params={"weight": (c_out, self.c), "bias": (c_out,)}, module="head")

    def model(self, name: str, source: str) -> Model:
        buffers = {"batch_norm_statistics": self.statistics * 4.0} if self.statistics else {}
        return Model(
            name=name, workload="convnet", input_kind="images", tensors=tuple(self.tensors), source=source,
            dtype="fp32",
            spec=ConvSpec(layers=tuple(self.layers), image_size=self.image_size), buffers=MappingProxyType(buffers),
        )


def resnet(name: str, image_size: int = IMAGE_SIZE) -> Model:
    """ResNet: a 7x7 stem, four stages of residual blocks, global average pool, one linear layer.

    Execution order is main branch, then the projection of the shortcut, then the addition; this is also the order of
    registration in torchvision.
    """
    bottleneck, depths = RESNETS[name]
    net = _Net(3, image_size)
    net.conv("conv1", 64, 7, 2)
    net.bn("bn1")
    net.pointwise("relu", "relu")
    net.pool("maxpool", "maxpool", (net.side - 1) // 2 + 1, kernel=3, stride=2)
    index = 0
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), start=1):
        for i in range(depth):
            stride = 2 if stage > 1 and i == 0 else 1
            _residual_block(net, f"layer{stage}.{i}", width, stride, bottleneck, index)
            index += 1
    net.pool("avgpool", "avgpool", 1, kernel=net.side, stride=net.side)
    net.linear("fc", CLASSES)
    return net.model(name, "arXiv 1512.03385, torchvision v1.5 variant")


def _residual_block(net: _Net, at: str, width: int, stride: int, bottleneck: bool, index: int) -> None:
    c_in, side_in = net.c, net.side
    c_out = width * (4 if bottleneck else 1)
    kernels = ((width, 1, 1), (width, 3, stride), (c_out, 1, 1)) if bottleneck else ((width, 3, stride), (c_out, 3, 1))
    for i, (c, kernel, step) in enumerate(kernels, start=1):
        net.conv(f"{at}.conv{i}", c, kernel, step, layer=index)
        net.bn(f"{at}.bn{i}", layer=index)
        if i < len(kernels):
            net.pointwise("relu", f"{at}.relu{i}")
    if stride > 1 or c_in != c_out:
        net.c, net.side = c_in, side_in
        net.conv(f"{at}.downsample.0", c_out, 1, stride, layer=index)
        net.bn(f"{at}.downsample.1", layer=index)
    net.pointwise("add", f"{at}.add")
    net.pointwise("relu", f"{at}.relu")


def vgg(name: str, image_size: int = IMAGE_SIZE) -> Model:
    """VGG: five stages of 3x3 convolutions with bias, each closed by a 2x2 max pool, then 4096-4096-1000."""
    depths = VGGS[name.removesuffix("-bn")]
    normed = name.endswith("-bn")
    net = _Net(3, image_size)
    position, index = 0, 0
    for depth, width in zip(depths, (*WIDTHS, 512), strict=True):
        for _ in range(depth):
            net.conv(f"features.{position}", width, 3, bias=True, layer=index)
            if normed:
                net.bn(f"features.{position + 1}", layer=index)
            net.pointwise("relu", f"features.{position + 1 + normed}")
            position += 2 + normed
            index += 1
        net.pool("maxpool", f"features.{position}", net.side // 2, kernel=2, stride=2)
        position += 1
    if net.side != VGG_GRID:
        stride = max(net.side // VGG_GRID, 1)
        net.pool("avgpool", "avgpool", VGG_GRID, kernel=stride, stride=stride)
    for i, width in ((0, 4096), (3, 4096), (6, CLASSES)):
        net.linear(f"classifier.{i}", width)
        if i < 6:
            net.pointwise("relu", f"classifier.{i + 1}")
    return net.model(name, "arXiv 1409.1556, torchvision")
