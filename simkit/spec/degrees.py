"""The degrees of parallelism of a plan: given ones checked, the others filled in."""

from __future__ import annotations

from typing import Any

from simkit.errors import InputError, RefusedError
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.scenario import Scenario


def degrees(scenario: Scenario, net: Model, world: int) -> dict[str, Any]:
    """The fields of the plan that say how `world` GPUs share the work: world = dp·tp·pp·cp, ep divides dp.

    Raises InputError where they contradict each other, the GPUs or the network, RefusedError where the network or the
    gradient exchange is priced under data parallelism alone.
    """
    file = scenario.file
    tp, pp, cp, ep, vpp = (scenario.get(k, 1) for k in ("tp", "pp", "cp", "ep", "vpp"))
    model_parallel = tp * pp * cp
    if world % model_parallel:
        raise InputError(
            f"of tp {tp} x pp {pp} x cp {cp} does not divide the {world} GPUs",
            file=file,
            key="the product",
            hint="change a degree or the cluster",
        )
    dp = scenario.get("dp", world // model_parallel)
    if dp * model_parallel != world:
        raise InputError(
            f"x tp {tp} x pp {pp} x cp {cp} is not the {world} GPUs of the cluster",
            file=file,
            key="dp",
            value=dp,
            hint=f"dp = {world // model_parallel} does",
        )
    sp = scenario.get("sp", 1)
    if sp not in (1, tp):
        raise InputError(
            f"is neither 1 nor tp = {tp}",
            file=file,
            key="sp",
            value=sp,
            hint="sequence parallelism runs over the tensor-parallel ranks",
        )
    if dp % ep:
        raise InputError(f"does not divide dp = {dp}", file=file, key="ep", value=ep)
    zero = scenario.get("zero", 0)
    group = scenario.get("shard_group", dp)
    if dp % group:
        raise InputError(f"does not divide dp = {dp}", file=file, key="shard_group", value=group)
    spec = net.spec
    offload = scenario.get("offload", "none")
    if model_parallel * ep > 1 or zero > 0 or offload != "none":
        if not isinstance(spec, TransformerSpec) or spec.kind not in ("decoder", "encoder"):
            degrees = "tp, pp, cp, ep, zero and offload"
            raise RefusedError(f"{net.name} is priced under data parallelism alone; leave {degrees} out")
        if scenario.get("method", "s-sgd") != "s-sgd":
            raise RefusedError(
                f"{scenario.get('method')} is priced under data parallelism alone; leave it out, or the other degrees"
            )
        if spec.heads % tp:
            raise InputError(f"does not divide the {spec.heads} heads of {net.name}", file=file, key="tp", value=tp)
        if spec.layers < pp * vpp:
            raise InputError(
                f"x vpp {vpp} exceeds the {spec.layers} layers of {net.name}", file=file, key="pp", value=pp
            )
    schedule = scenario.get("schedule", "interleaved" if vpp > 1 else "1f1b")
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "sp": sp,
        "vpp": vpp,
        "zero": zero,
        "shard_group": group,
        "schedule": schedule,
        "offload": offload,
    }
