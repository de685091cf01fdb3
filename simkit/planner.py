"""What a planner would choose where nothing was given: the micro-batch that fits, the accumulation, the method.

micro-batch   the largest power of two that fits with a tenth of the memory left free, at most what the global batch
needs
accumulation  enough micro-batches for a usual global batch of such a network (`USUAL_SAMPLES`, `USUAL_TOKENS`)
method        S-SGD, unless ACP-SGD (same convergence in its paper's experiments) is at least 10 % faster over this
network
"""

from __future__ import annotations

from dataclasses import replace

from simkit.evaluate import Evaluation, evaluate, is_sharded
from simkit.memory import divisors
from simkit.spec.model import TransformerSpec
from simkit.spec.plan import Plan
from simkit.spec.resolve import Resolved

USUAL_TOKENS = {"decoder": 2.0**19, "encoder": 2.0**17, "encoder-decoder": 2.0**17}
"""Tokens per step: 0.5 M for decoders (GPT-3 XL to 2.7B; Brown et al. 2020, table 2.1), 256 x 512 = 131,072 for
encoders (Devlin et al. 2019) and T5 (Raffel et al. 2020: 2^16 to 2^17)."""
USUAL_SAMPLES = {"images": 1024, "vit": 4096}
"""Images per step: 256 a node of eight scaled four times (Goyal et al. 2017); 4,096 (Dosovitskiy et al. 2020)."""
HEADROOM = 0.9
GAIN = 1.10


def planned(resolved: Resolved) -> Resolved:
    """The same with every open field chosen and stated; what does not fit stays an answer.

    Raises InputError for micro-batches that the interleaved schedule of the stack cannot take.
    """
    chosen = settled(resolved)
    interleavable(chosen, chosen.plan.grad_accum)
    return chosen


def interleavable(resolved: Resolved, grad_accum: int) -> None:
    """Raises InputError for micro-batches a step that the interleaved schedule of the stack cannot take."""
    plan = resolved.plan
    if plan.vpp > 1:
        from simkit.schedules import interleaved

        interleaved.group(
            stages=plan.pp, micro_batches=grad_accum, flexible=not resolved.stack.strict_interleaving
        )


def settled(resolved: Resolved) -> Resolved:
    """The same with every open field chosen and stated."""
    chosen = resolved
    if "method" in chosen.open and chosen.plan.method != "s-sgd":
        chosen = replace(chosen, plan=replace(chosen.plan, method="s-sgd"))
    if chosen.open - {"method"}:
        chosen = _batched(chosen)
    if "method" in chosen.open and chosen.cluster.nodes > 1 and not is_sharded(chosen.plan):
        chosen = _method(chosen)
    return replace(chosen, open=frozenset()) if chosen.open else chosen


def usual_samples(resolved: Resolved) -> int:
    """Samples per step usual for such a network."""
    spec = resolved.model.spec
    if isinstance(spec, TransformerSpec):
        if spec.kind == "vit":
            return USUAL_SAMPLES["vit"]
        return max(int(USUAL_TOKENS[spec.kind] / max(resolved.plan.seq_len, 1)), 1)
    return USUAL_SAMPLES["images"]


def _batched(resolved: Resolved) -> Resolved:
    plan, notes = resolved.plan, list(resolved.assumptions)
    dp = plan.dp
    total = resolved.scenario.get("global_batch")
    per_rank = total // dp if total else max(round(usual_samples(resolved) / dp), 1)
    if "micro_batch" in resolved.open:
        micro, least = _largest_fit(resolved, per_rank, exact=total is not None)
        plan = replace(plan, micro_batch=micro)
        why = "the largest that fits with a tenth of the memory free, and that the global batch can use"
        if least:
            why = "the smallest; no larger one fits with a tenth of the memory free"
        notes.append(f"micro_batch = {micro}: {why}")
    if "grad_accum" in resolved.open:
        accum = _accumulated(resolved, per_rank, plan.micro_batch)
        plan = replace(plan, grad_accum=accum)
        if total is None:
            notes.append(
                f"grad_accum = {accum}: a global batch of {plan.global_batch} samples, usual for such a network"
            )
    return replace(resolved, plan=plan, assumptions=tuple(notes))


def _largest_fit(resolved: Resolved, per_rank: int, *, exact: bool) -> tuple[int, bool]:
    """The largest power of two (a divisor of the samples of a rank where the global batch is given) that fits, and
    whether it is the smallest of several, which may not fit either."""
    sizes = divisors(per_rank)[::-1] if exact else [2**i for i in range(per_rank.bit_length())]
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(resolved, per_rank, sizes[middle]):
            low = middle
        else:
            high = middle - 1
    return sizes[low], low == 0 and len(sizes) > 1


def _accumulated(resolved: Resolved, per_rank: int, micro: int) -> int:
    """Micro-batches of this size in the samples of a rank; a usual batch is rounded up to what interleaving takes."""
    plan, accum = resolved.plan, max(per_rank // micro, 1)
    if plan.vpp > 1 and not resolved.scenario.get("global_batch"):
        accum = -(-accum // plan.pp) * plan.pp
    return accum


def _fits(resolved: Resolved, per_rank: int, micro: int) -> bool:
    """With as many micro-batches as there will be: a pipeline holds several at once."""
    plan = resolved.plan
    accum = _accumulated(resolved, per_rank, micro) if "grad_accum" in resolved.open else plan.grad_accum
    found = evaluate(replace(resolved, plan=replace(plan, micro_batch=micro, grad_accum=accum)), advise=False)
    return found.memory.reserved_bytes <= HEADROOM * found.memory.capacity_bytes


def rival(resolved: Resolved) -> Resolved:
    """The same under ACP-SGD, at the rank given or usual for such a network."""
    plan = resolved.plan
    usual = 32 if isinstance(resolved.model.spec, TransformerSpec) else 4
    rank = plan.rank if resolved.scenario.given("rank") else usual
    return replace(resolved, plan=replace(plan, method="acp-sgd", rank=rank))


def _method(resolved: Resolved) -> Resolved:
    other = rival(resolved)
    plain, compressed = _seconds(resolved), _seconds(other)
    if compressed.end_s * GAIN < plain.end_s and (compressed.memory.fits or not plain.memory.fits):
        note = (
            f"method = acp-sgd, rank {other.plan.rank}: {plain.end_s / compressed.end_s:.1f}x faster than s-sgd here "
            f"({plain.end_s:.3g} s a step); "
            "it changes the gradient, see `simkit methods`"
        )
        return replace(other, assumptions=(*resolved.assumptions, note))
    return replace(
        resolved,
        assumptions=(*resolved.assumptions, "method = s-sgd: none given; compression gains less than 10 % here"),
    )


def _seconds(resolved: Resolved) -> Evaluation:
    return evaluate(resolved)


__all__ = ["Plan", "interleavable", "planned", "rival", "settled", "usual_samples"]
