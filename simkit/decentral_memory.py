"""The memory of the stage over peers that has least room to spare, itemised, and what would make it fit."""

from __future__ import annotations

from simkit.decentral_search import Answer, holds, needs
from simkit.memory import CONTEXT_BYTES, CONTEXT_DEFAULT_BYTES, FRAGMENTATION, Memory
from simkit.memory_facts import OPTIMIZER_STATES, WORKSPACE_BYTES
from simkit.program import basis
from simkit.spec.plan import DTYPE_BYTES
from simkit.units import format_bytes


def memory_of(found: Answer) -> Memory:
    """Of the stage with least room to spare, itemised."""
    job, posed = found.crew.job, found.problem
    rows = needs(posed, found.assignment)
    spots = [(d, r) for d, row in enumerate(rows) for r in range(len(row))]
    d, r = min(spots, key=lambda s: posed.room_bytes[found.assignment.pipelines[s[0]][s[1]].peer] - rows[s[0]][s[1]])
    held = found.assignment.pipelines[d][r]
    kind = found.crew.kinds[int(posed.kind[held.peer])]
    i, j = held.begin, held.end
    flying = float(posed.in_flight[min(len(found.assignment.pipelines[d]) - r, len(posed.in_flight) - 1)])
    plan, element = found.plan, DTYPE_BYTES[found.plan.master_dtype]
    trained = float(job.trained[i, j])
    workspace = float(WORKSPACE_BYTES) if kind.device.kind == "gpu" else 0.0
    items = {"gradients": trained * element, "optimizer": trained * element * OPTIMIZER_STATES[plan.optimizer],
             "activations": (flying * float(job.kept_bytes[i, j]) + job.replay_bytes) / (1.0 + FRAGMENTATION),
             "logits": float(basis(plan.micro_batch, plan.seq_len) @ job.program.logits) if j == job.count else 0.0,
             "exchange": trained * job.exchange_copies, "workspace": workspace}  # fmt: skip
    states = float(job.state_bytes[i, j]) / (1.0 + FRAGMENTATION)
    items["weights"] = states - items["gradients"] - items["optimizer"] - items["logits"] - items["exchange"]
    allocated = sum(items.values())
    context = 0.0
    if kind.device.kind == "gpu":
        context = float(CONTEXT_BYTES.get(kind.device.architecture, CONTEXT_DEFAULT_BYTES))
    reserved = allocated * (1.0 + FRAGMENTATION)
    offered = found.asked.peers[held.peer].memory_bytes
    why = out = ""
    if not found.fits:
        why = f"stage {r} of {len(rows[d])} needs {format_bytes(reserved + context)}, {kind.device.title} offers " \
              f"{format_bytes(offered)}"  # fmt: skip
        alone = [h for h in holds(found.asked) if not h["holds"]]
        out = "not even one unit fits: take larger cards or peft = lora" if alone else \
            "more peers, a smaller micro_batch, peft = lora or fewer pipelines (dp) need less"  # fmt: skip
    order = ("weights", "gradients", "optimizer", "activations", "logits", "exchange", "workspace")
    shown = {k: max(items[k], 0.0) for k in order} | {"fragmentation": reserved - allocated, "context": context}
    return Memory(
        items_bytes=shown, allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=reserved + context,
        capacity_bytes=offered - context - job.reserve_bytes, fits=found.fits, why_not=why, advice=lambda: out,
        stage=r,
    )  # fmt: skip
