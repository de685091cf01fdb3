"""Suite ``inference``: a small decoder of the Llama family, prompt and generation, eager and with a key-value cache.

Rows: ``ttft_s``, the pass over the prompt, and ``tpot_s``, a generated token at a context of prompt and half of the
output. The network's ``config.json`` is written beside the tables, so that a row names it by its path.
"""

from __future__ import annotations

import json
from typing import Any

from simkit.measure import Case, Options, Samples
from simkit.measure_device import dtypes, of_dtype
from simkit.measure_machine import Machine, torch_or_complain
from simkit.measure_models import LLAMA, llama
from simkit.measure_store import write_text
from simkit.measure_timing import Timer

TABLE = "inference"
TAKES = ("batch", "seq_len")
LENGTHS, QUICK_LENGTHS = ((1, 128, 32), (1, 512, 32), (4, 128, 32), (16, 64, 32)), ((1, 128, 32),)
"""(batch, prompt, output)."""


def cases(host: Machine, options: Options) -> list[Case]:
    """A case per batch and lengths."""
    path = options.out / "models" / "small-llama" / "config.json"
    write_text(path, json.dumps(LLAMA, indent=1) + "\n")
    lengths = list(QUICK_LENGTHS if options.quick else LENGTHS)
    if options.batch or options.seq_len:
        lengths = [(options.batch or 1, options.seq_len or 128, 32)]
    found = []
    for batch, prompt, output in lengths:
        precision = dtypes(host)[0]
        fields: dict[str, Any] = {"model": str(path), "task": "inference", "cluster": f"1x1x{host.name}"}
        fields["precision"] = precision
        fields |= {"batch": batch, "prompt_len": prompt, "output_len": output, "engine": "transformers"}
        run = _Run(batch, prompt, output, host, options)
        found.append(Case(id=f"small-llama/{batch}x{prompt}+{output}", fields=fields, run=run))
    return found


class _Run:
    """One batch and its lengths."""

    def __init__(self, batch: int, prompt: int, output: int, host: Machine, options: Options) -> None:
        self.batch, self.prompt, self.output, self.host, self.options = batch, prompt, output, host, options

    def __call__(self) -> Samples:
        torch = torch_or_complain()
        torch.manual_seed(0)
        host = self.host
        timer = Timer(torch, host.device, quick=self.options.quick, cpu_time=host.device == "cpu" and host.threads == 1)
        network: Any = llama(LLAMA, host.device, of_dtype(torch, dtypes(host)[0]))
        cache = network.cache(self.batch, self.prompt + self.output)
        tokens = torch.zeros(self.batch, self.prompt, dtype=torch.long, device=host.device)
        middle = self.prompt + self.output // 2
        first = timer.samples(lambda: network.step(tokens, cache, 0))
        token = tokens[:, :1]
        each = timer.samples(lambda: network.step(token, cache, middle))
        return Samples({"ttft_s": first, "tpot_s": each}, "random weights")
