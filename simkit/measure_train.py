"""Suite ``train``: training steps of small networks, or of one of your own, on this device.

Rows: ``iteration_time_s`` of a step (forward, backward, SGD with momentum) of one process. On a CPU with one thread the
seconds are processor time, and a compute profile (`simkit.spec.profiled`) is written beside the tables, which
``simkit predict --model OUT/compute/….json`` reads.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from simkit import measure_compute
from simkit.errors import InputError
from simkit.measure import Case, Options, Samples
from simkit.measure_machine import Machine, torch_or_complain
from simkit.measure_store import write_text
from simkit.spec.trace_module import module_of

TABLE = "train"
TAKES = ("model", "batch")
MODELS = ("simkit.measure_models:transformer", "simkit.measure_models:convnet")
BATCHES, QUICK_BATCHES = (4, 8, 32), (8,)
STEPS, QUICK_STEPS = 20, 5
SEED = 0


def cases(host: Machine, options: Options) -> list[Case]:
    """A case per model and batch. Raises InputError for a model that cannot be made."""
    models = (options.model,) if options.model else MODELS
    batches = (options.batch,) if options.batch else QUICK_BATCHES if options.quick else BATCHES
    found = []
    for model in models:
        for batch in batches:
            fields = {"model": model, "cluster": f"1x1x{host.name}", "precision": "fp32", "micro_batch": batch}
            fields |= {"grad_accum": 1, "optimizer": "sgd-momentum"}
            run = _Run(model, batch, host, options)
            found.append(Case(id=f"{model}/{batch}", fields=fields, run=run))
    return found


class _Run:
    """One model at one batch."""

    def __init__(self, model: str, batch: int, host: Machine, options: Options) -> None:
        self.model, self.batch, self.host, self.options = model, batch, host, options

    def __call__(self) -> Samples:
        torch = torch_or_complain()
        torch.manual_seed(SEED)
        module = module_of(self.model).to(self.host.device).train()
        inputs = moved(example(module, self.model, self.batch), self.host.device)
        loss = lossy(module, inputs)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        single = self.host.device == "cpu" and self.host.threads == 1

        def clock() -> float:
            if self.host.device == "cuda":
                torch.cuda.synchronize()
            return time.thread_time() if single else time.perf_counter()

        steps = measure_compute.watch(
            module, loss, optimizer, steps=QUICK_STEPS if self.options.quick else STEPS, clock=clock
        )
        if self.host.device == "cpu":
            self._write(module, steps, inputs)
        totals = [sum(t) for t in zip(steps.forward_s, steps.backward_s, steps.optimizer_s, strict=True)]
        return Samples({"iteration_time_s": totals}, "processor seconds" if single else "")

    def _write(self, module: Any, steps: measure_compute.Steps, inputs: tuple[Any, ...]) -> Path:
        first = inputs[0]
        kind = "images" if first.dim() == 4 else "tokens" if not first.is_floating_point() else "samples"
        data = measure_compute.profile(
            module,
            steps,
            name=f"{self.model.rpartition(':')[2]} at {self.batch}",
            device=self.host.name,
            batch=self.batch,
            kind=kind,
            date=self.host.date,
        )
        stem = re.sub(r"[^a-z0-9]+", "-", self.model.rpartition(":")[2].lower())
        path = self.options.out / "compute" / f"{stem}-{self.batch}-{self.host.name}.json"
        write_text(path, json.dumps(data, indent=1) + "\n")
        return path


def example(module: Any, name: str, batch: int) -> tuple[Any, ...]:
    """What the module is fed, from its ``example_inputs``. Raises InputError where it has none."""
    if not callable(getattr(module, "example_inputs", None)):
        hint = "give the module a method example_inputs(batch) that returns its inputs"
        raise InputError("does not say what it is fed", key="--model", value=name, hint=hint)
    given = module.example_inputs(batch)
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def moved(inputs: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """The inputs on the device."""
    return tuple(t.to(device) for t in inputs)


def lossy(module: Any, inputs: tuple[Any, ...]) -> Any:
    """The loss of the module: its ``training_loss``, else the mean square of what it returns."""
    if callable(getattr(module, "training_loss", None)):
        return lambda: module.training_loss(*inputs)
    return lambda: module(*inputs).float().pow(2).mean()
