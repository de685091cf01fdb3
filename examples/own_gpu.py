"""A card nobody has yet: describe it in a handful of figures, then ask."""

import tempfile
from pathlib import Path

import simkit

CARD = """
[device]
title = "My next GPU"
memory = "48 GiB"
memory_bandwidth = "2 TB/s"
power = "400 W"

[device.peak]
fp32 = "60 TFLOP/s"
bf16 = "400 TFLOP/s"
"""

with tempfile.TemporaryDirectory() as folder:
    devices = Path(folder) / "devices"
    devices.mkdir()
    (devices / "my-next-gpu.toml").write_text(CARD)
    report = simkit.predict(model="bert-large", cluster="1x1xmy-next-gpu", micro_batch=16, profiles=(folder,))

print("device:", report.device_names[0])
print("fits:", report.fits)
print("assumed:", next(line for line in report.assumptions if line.startswith("precision")))
