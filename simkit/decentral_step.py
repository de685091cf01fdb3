"""One training step of an assignment: pipelines of unequal stages beside each other, and what their replicas exchange.

    pipeline d     n_d micro-batches through its chain (`simkit.chain`): 1F1B by the recurrence, GPipe in closed form
    replicas       peers that hold the same units average their gradients once a step, when their last backward pass
                   has ended: one all-reduce (or all-gather) a phase of the compressor, over their access lines
    step           max over peers of (end of the stage + exchange + optimizer)
    staleness > 0  nobody waits: max(n·interval + optimizer, exchange), the pipeline never drains

The micro-batches of a step are dealt to the pipelines so that they end together. A line is shared: an uplink carries
activations one way and gradients the other in the order in which they are made, a downlink gives each of the two
incoming streams its share. Sources: FusionAI (arXiv 2309.01172); SWARM (arXiv 2301.11913); `simkit.chain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from simkit import plugins, schedules
from simkit.chain import ESTIMATES, Chain, bottleneck_s, endless_s, gpipe_s, interval_s, through_s
from simkit.decentral_job import Job, Kind
from simkit.decentral_lines import HOST_S, PAYLOAD, RELAY_SHARE, latency_s, line_of, lines, wire_s
from simkit.des.chain import step as walk
from simkit.exchange import Method, buffers
from simkit.placement import Assignment, Held, Problem
from simkit.price import pricing
from simkit.roofline import Array, Law
from simkit.spec.peers import Peer
from simkit.spec.plan import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How peers work together. schedule: ``1f1b`` or ``gpipe``; wire: a format of `simkit.wire` with its density;
    exchange: a compressor of `simkit.compressors`; algorithm: ``butterfly`` or ``ring``; staleness: steps that a
    gradient may be late."""

    schedule: str = "1f1b"
    wire: str = "none"
    density: float = 0.01
    exchange: str = "s-sgd"
    algorithm: str = "butterfly"
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipe:
    """One pipeline: who holds what, its chain, when its stages end and its micro-batches are done."""

    held: tuple[Held, ...]
    chain: Chain
    micro_batches: int
    end_s: float
    stage_end_s: Array
    done_s: Array
    sent_bytes: Array
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """end_s: of the whole step. exchange_s, optimizer_s, busy_s: by peer; wire_bytes: what a peer sends for the
    exchange, at most; critical: (pipeline, stage) that ends last."""

    end_s: float
    pipes: tuple[Pipe, ...]
    exchange_s: Array
    optimizer_s: Array
    busy_s: Array
    wire_bytes: float
    critical: tuple[int, int]
    exact: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Crew:
    """A job and its peers: kinds of devices, which kind each peer is, and its time over that of its kind."""

    job: Job
    peers: Sequence[Peer]
    kinds: tuple[Kind, ...]
    kind: Array
    slow: Array

    def compute_s(self, rules: Rules) -> tuple[Array, Array]:
        """(forward, backward) (kinds, n+1, n+1), with what encoding and decoding of messages takes."""
        passes = plugins.get("simkit.wire", rules.wire).PASSES
        cut = self.job.cut_bytes
        handled = (cut[None, :] + cut[:, None]) * passes
        forward = np.stack([k.forward_s + handled / k.memory_Bps for k in self.kinds])
        backward = np.stack([k.backward_s + handled / k.memory_Bps for k in self.kinds])
        return forward, backward


def problem(crew: Crew, rules: Rules, *, micro_batches: int, depth: int, seed: int, forced: bool = False) -> Problem:
    """The placement problem of a crew. depth: the most stages of a pipeline; forced: all of them hold something."""
    forward, backward = crew.compute_s(rules)
    job, peers = crew.job, crew.peers
    raw = job.cut_bytes
    cut = plugins.get("simkit.wire", rules.wire).sent_bytes(
        raw, element_bytes=job.element_bytes, density=rules.density, share=1.0)  # fmt: skip
    behind = np.arange(depth + 1, dtype=float)
    held = np.full(depth + 1, float(micro_batches)) if rules.schedule == "gpipe" and not rules.staleness else behind
    relay = np.array([RELAY_SHARE if p.relay else 1.0 for p in peers]) * PAYLOAD
    return Problem(
        compute_s=forward + backward,
        state_bytes=np.broadcast_to(job.state_bytes, forward.shape),
        kept_bytes=job.kept_bytes,
        cut_bytes=np.asarray(cut),
        kind=np.asarray(crew.kind, dtype=np.int64),
        slow=crew.slow,
        room_bytes=_room(crew),
        up_Bps=np.array([p.up_Bps for p in peers]) * relay,
        down_Bps=np.array([p.down_Bps for p in peers]) * relay,
        region=tuple(p.region for p in peers),
        in_flight=np.minimum(held, float(micro_batches)),
        seed=seed,
        depth=depth,
        forced=forced,
    )


def _room(crew: Crew) -> Array:
    """What each peer can hold: of its device, less where the peer has less memory than such a device."""
    kinds = [crew.kinds[int(k)] for k in crew.kind]
    return np.array([k.room_bytes - k.device.memory_bytes + p.memory_bytes
                     for k, p in zip(kinds, crew.peers, strict=True)])  # fmt: skip


def chains(crew: Crew, rules: Rules, assignment: Assignment) -> list[tuple[Chain, Array]]:
    """(chain, bytes sent to the next stage) of every pipeline of an assignment."""
    module = plugins.get("simkit.wire", rules.wire)
    forward, backward = crew.compute_s(rules)
    raw, slowest = crew.job.cut_bytes, 0.0
    rates = []
    for held in assignment.pipelines:
        rates.append(_rates(crew.peers, held, raw))
        cuts = raw[[h.end for h in held[:-1]]]
        for row in rates[-1]:
            if len(cuts):
                slowest = max(slowest, float((cuts / row).max()))
    out = []
    for held, (there, back) in zip(assignment.pipelines, rates, strict=True):
        cuts = raw[[h.end for h in held[:-1]]]

        def sent(rate: Array, cuts: Array = cuts) -> Array:
            share = cuts / rate / slowest if slowest else 0.0 * cuts
            return np.asarray(module.sent_bytes(cuts, element_bytes=crew.job.element_bytes, density=rules.density,
                                                share=share))  # fmt: skip

        pairs = [(crew.peers[a.peer], crew.peers[b.peer]) for a, b in pairwise(held)]
        who = np.array([h.peer for h in held])
        kind, slow = np.asarray(crew.kind)[who].astype(int), np.asarray(crew.slow)[who]
        begin, end = np.array([h.begin for h in held]), np.array([h.end for h in held])
        zero = np.zeros(1)
        out.append((Chain(
            forward_s=forward[kind, begin, end] * slow,
            backward_s=backward[kind, begin, end] * slow,
            send_s=np.concatenate([sent(there) / there, zero]),
            back_s=np.concatenate([zero, sent(back) / back]),
            delay_s=np.concatenate([[latency_s(a, b) for a, b in pairs], zero]),
            back_delay_s=np.concatenate([zero, [latency_s(b, a) for a, b in pairs]]),
        ), np.concatenate([sent(there), zero])))  # fmt: skip
    return out


def _rates(peers: Sequence[Peer], held: Sequence[Held], raw: Array) -> tuple[Array, Array]:
    """(payload byte/s forward over each cut, backward): the uplink of the sender and the receiver's share of its
    downlink, which the stream from the other neighbour uses too."""
    there, back = [], []
    cuts = [float(raw[h.end]) for h in held[:-1]]
    for i, cut in enumerate(cuts):
        a, b = peers[held[i].peer], peers[held[i + 1].peer]
        before, after = cuts[i - 1] if i else 0.0, cuts[i + 1] if i + 1 < len(cuts) else 0.0
        relay = RELAY_SHARE if a.relay or b.relay else 1.0
        there.append(min(a.up_Bps, b.down_Bps * cut / (cut + after)) * PAYLOAD * relay)
        back.append(min(b.up_Bps, a.down_Bps * cut / (cut + before)) * PAYLOAD * relay)
    return np.array(there), np.array(back)


def dealt(total: int, each: Sequence[Chain], rules: Rules) -> list[int]:
    """`total` micro-batches over the pipelines, so that the last of them ends as early as the estimates allow: one by
    one to whoever would be done first, in blocks where there are many."""
    if len({_key(c) for c in each}) == 1:
        same, more = divmod(total, len(each))
        return [same + (i < more) for i in range(len(each))]
    estimate = endless_s if rules.staleness else ESTIMATES[rules.schedule]
    first = np.array([float(estimate(c, 1)) for c in each])
    slope = np.maximum(np.array([float(estimate(c, 2)) for c in each]) - first, 1e-30)
    low, high = 0.0, float(first.max() + slope.max() * total)
    for _ in range(100):
        middle = 0.5 * (low + high)
        fits = np.floor(np.maximum(middle - first, -slope) / slope + 1.0).sum()
        low, high = (low, middle) if fits >= total else (middle, high)
    found = np.floor(np.maximum(high - first, -slope) / slope + 1.0).astype(int)
    while found.sum() > total:
        found[int(np.argmax(np.where(found > 0, first + (found - 1) * slope, -1.0)))] -= 1
    return [int(n) for n in found]


def _key(chain: Chain) -> tuple[bytes, ...]:
    return tuple(getattr(chain, n).tobytes() for n in
                 ("forward_s", "backward_s", "send_s", "back_s", "delay_s", "back_delay_s"))  # fmt: skip


def step(crew: Crew, rules: Rules, assignment: Assignment, *, micro_batches: int, estimate: bool = False) -> Step:
    """One step of `micro_batches` in all. estimate: closed forms alone, for a search."""
    found = chains(crew, rules, assignment)
    counts = dealt(micro_batches, [c for c, _ in found], rules)
    known: dict[Any, tuple[float, Array, Array, bool]] = {}
    pipes = []
    for held, (chain, sent), n in zip(assignment.pipelines, found, counts, strict=True):
        key = (*_key(chain), n)
        if key not in known:
            known[key] = _ends(chain, rules, n, estimate)
        end, stage_end, done, exact = known[key]
        pipes.append(Pipe(held=held, chain=chain, micro_batches=n, end_s=end, stage_end_s=stage_end, done_s=done,
                          sent_bytes=sent, exact=exact))  # fmt: skip
    exchange, wire = exchanged(crew, rules, assignment)
    optimizer, busy = np.zeros(len(crew.peers)), np.zeros(len(crew.peers))
    for pipe in pipes:
        for r, h in enumerate(pipe.held):
            kind = crew.kinds[int(crew.kind[h.peer])]
            optimizer[h.peer] = kind.optimizer_s[h.begin, h.end] * crew.slow[h.peer]
            busy[h.peer] = pipe.micro_batches * float(pipe.chain.busy_s[r]) + optimizer[h.peer]
    last, critical = -1.0, (0, 0)
    for d, pipe in enumerate(pipes):
        for r, h in enumerate(pipe.held):
            if rules.staleness:
                end = max(pipe.end_s + optimizer[h.peer], exchange[h.peer])
            else:
                end = float(pipe.stage_end_s[r]) + exchange[h.peer] + optimizer[h.peer]
            if end > last:
                last, critical = end, (d, r)
    return Step(end_s=last, pipes=tuple(pipes), exchange_s=exchange, optimizer_s=optimizer, busy_s=busy,
                wire_bytes=wire, critical=critical, exact=all(p.exact for p in pipes))  # fmt: skip


def _ends(chain: Chain, rules: Rules, n: int, estimate: bool) -> tuple[float, Array, Array, bool]:
    """(end, end of every stage, when each micro-batch is done, exact)."""
    if not n:
        return 0.0, np.zeros(chain.stages), np.zeros(0), True
    if rules.staleness:
        each = float(interval_s(chain, bounded=False))
        return n * each, np.full(chain.stages, n * each), np.asarray(each * np.arange(1.0, n + 1.0)), True
    if estimate:
        end = float(ESTIMATES[rules.schedule](chain, n))
        return end, np.full(chain.stages, end), np.zeros(0), False
    if rules.schedule == "gpipe":
        return _gpipe(chain, n)
    run, exact = walk(chain, schedules.get(rules.schedule).order, n)
    return float(run.end_s), run.stage_end_s, run.done_s, exact


def _gpipe(chain: Chain, n: int) -> tuple[float, Array, Array, bool]:
    """As `_ends`, in closed form: stage r ends when the last gradient that came from the stages behind has passed."""
    turned = float(through_s(chain, n))
    ends = np.zeros(chain.stages)
    for r in range(chain.stages):
        tail = slice(r, None)
        slow = max(float(chain.backward_s[tail].max()), float(chain.back_s[r + 1 :].max(initial=0.0)))
        way = float(chain.backward_s[tail].sum() + (chain.back_s + chain.back_delay_s)[r + 1 :].sum())
        ends[r] = turned + way + (n - 1) * slow
    slowest = float(bottleneck_s(chain, backward=True))
    end = float(gpipe_s(chain, n))
    return end, ends, np.asarray(end - slowest * np.arange(n - 1, -1, -1), dtype=np.float64), True


# -- what replicas exchange --------------------------------------------------------------------------------------------


def exchanged(crew: Crew, rules: Rules, assignment: Assignment) -> tuple[Array, float]:
    """(seconds by peer, bytes that the busiest peer sends) of averaging gradients over the replicas of every unit,
    and of keeping the two copies of a tied table equal."""
    seconds, sent = np.zeros(len(crew.peers)), np.zeros(len(crew.peers))
    replicas = len(assignment.pipelines)
    if replicas > 1:
        law = pricing(crew.kinds[0].device, "fp32", crew.job.stack, calibration=crew.job.calibrated).law
        phases = _phases(crew.job, rules, replicas, law)
        groups: dict[tuple[int, ...], list[int]] = {}
        owners = np.array([_owners(held, crew.job.count) for held in assignment.pipelines])
        for u in range(crew.job.count):
            groups.setdefault(tuple(int(p) for p in owners[:, u]), []).append(u)
        device = {int(k): _coding(crew, rules, replicas, int(k)) for k in set(np.asarray(crew.kind).tolist())}
        rate, latency, relay = lines(crew.peers)
        known: dict[tuple[str, bytes], tuple[float, float]] = {}
        for members, held in groups.items():
            who = list(members)
            took = 0.0
            for op, nbytes, elements in phases:
                load = float(nbytes[held].sum())
                if load > 0.0:
                    key = op, np.stack([rate[who], latency[who], relay[who]]).tobytes()
                    if key not in known:
                        known[key] = line_of(op, rate[who], latency[who], relay[who], rules.algorithm)
                    moved = 2.0 * (replicas - 1) / replicas if op == "all_reduce" else replicas - 1.0
                    took += load * known[key][0] + known[key][1]
                    took += float(elements[held].sum()) * moved * HOST_S["fp32"]
                    sent[who] += moved * load
            coded = np.array([device[int(k)][held].sum() for k in np.asarray(crew.kind)[who]])
            seconds[who] += took + coded * np.asarray(crew.slow)[who]
    _tie(crew, assignment, seconds, sent)
    return seconds, float(sent.max(initial=0.0))


def _owners(held: Sequence[Held], units: int) -> list[int]:
    found = [-1] * units
    for h in held:
        found[h.begin : h.end] = [h.peer] * (h.end - h.begin)
    return found


def _tie(crew: Crew, assignment: Assignment, seconds: Array, sent: Array) -> None:
    """The peers with the embedding and with the head of a tied table exchange its gradient."""
    table = float(crew.job.units.head_table[-1])
    if not table or crew.job.lora_rank:
        return
    for held in assignment.pipelines:
        if len(held) > 1:
            ends = [crew.peers[held[0].peer], crew.peers[held[-1].peer]]
            nbytes = table * DTYPE_BYTES[crew.job.plan.reduce_dtype]
            took = float(wire_s("all_reduce", nbytes, ends)) + table * HOST_S["fp32"]
            for h in (held[0], held[-1]):
                seconds[h.peer] += took
                sent[h.peer] += nbytes


def _phases(job: Job, rules: Rules, replicas: int, law: Law) -> list[tuple[str, Array, Array]]:
    """(collective, bytes a unit, elements a unit) of each phase, averaged over the variants of the compressor."""
    if job.lora_rank:
        elements = job.adapters
        return [("all_reduce", elements * DTYPE_BYTES[job.plan.reduce_dtype], elements)]
    plan = replace(job.plan, method=rules.exchange, dp=replicas, fusion="bucket")
    found = buffers(job.program, job.model, plan=plan, law=law)
    owner = job.unit_of_tensors[job.program.tensor_index].astype(np.int64)
    out: list[tuple[str, Array, Array]] = []
    for tensors, _ in found:
        for phase, wire in enumerate(tensors.wires):
            per_unit = np.bincount(owner, weights=wire, minlength=job.count) / len(found)
            out.append((tensors.module.OP[phase], per_unit, per_unit / 4.0))
    return out


def _coding(crew: Crew, rules: Rules, replicas: int, kind: int) -> Array:
    """Seconds of encoding and decoding gradients, by unit."""
    job = crew.job
    if job.lora_rank:
        return np.zeros(job.count)
    law = pricing(crew.kinds[kind].device, "fp32", job.stack, calibration=job.calibrated).law
    plan = replace(job.plan, method=rules.exchange, dp=replicas, fusion="bucket")
    owner = job.unit_of_tensors[job.program.tensor_index].astype(np.int64)
    total = np.zeros(job.count)
    found = buffers(job.program, job.model, plan=plan, law=law)
    for tensors, _ in found:
        each = tensors.encode_s + tensors.decode_s + sum(tensors.between_s)
        total += np.bincount(owner, weights=each, minlength=job.count) / len(found)
    return total


def copies(model: Any, plan: Any, rules: Rules, replicas: int) -> float:
    """Bytes per trained element that exchanging gradients among `replicas` keeps on a device."""
    if replicas < 2:
        return 0.0
    module = plugins.get("simkit.compressors", rules.exchange)
    shapes = tuple((t.shape[0] * t.repeat, *t.shape[1:]) for t in model.tensors)
    asked = Method.of(replace(plan, method=rules.exchange, dp=replicas, fusion="bucket")).plan()
    kept: Mapping[str, float] = module.memory_bytes(shapes, plan=asked, ranks=replicas)
    return float(sum(kept.values())) / float(model.params)
