"""Any nn.Module: traced on the meta device, so that no weight is ever allocated. Needs the extra `kernels`."""

import simkit
from simkit.count import count
from simkit.spec.models import model

NAME = "own_module:net"


def net():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000)
    )


if __name__ == "__main__":
    # 3 x 7 x 7 x 64 + 64 of the convolution, 64 x 1000 + 1000 of the last layer.
    print("parameters:", f"{count(model(NAME))['params']:,}")
    report = simkit.predict(model=NAME, cluster="1x1x3080", micro_batch=32, precision="fp32")
    print("fits:", report.fits)
