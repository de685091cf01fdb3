"""A chain of peers that generates tokens: latency per token, as Petals serves large networks.

    tpot = client + sum over servers [ blocks · (block + hop) ] + messages
    block    max(weights / memory rate, launches) + cache · passes / memory rate
    messages for every server a request and an answer: latency and bytes/rate each (the client sits between)
    client   embedding and head on a processor without GPU: V·h·2 bytes at its memory rate
    ttft     the prompt through the same chain at once, compute bound

The servers are placed by the least sum of times under their memory (dynamic programming over runs of units).

What an engine costs (`ENGINES`) is fact with a source or derived from one:
- int8 products by LLM.int8() are bound by launches at batch 1: BLOOM-176B on 4 A100 takes 282 ms a token (Hugging Face,
  "A Gentle Introduction to 8-bit Matrix Multiplication", 2022), 280 products and the head: 0.99 ms a product.
- Petals 1.0 passed every block through a queue of its own between processes; merging the queues took a server of 8
  BLOOM blocks on an A100 from 26 s to 13.8 s (Petals pull request 225): 0.88 of a 16-bit block's 3.2 ms (its bytes at
  the streaming rate), 2.8 ms a block.
- an eager attention over a cache that is concatenated each step reads and writes it: 3 passes, twice where the layout
  is changed on the way (BLOOM): 6. They add up, since LLM.int8() waits for the device at every product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from simkit.decentral import base, refuse
from simkit.decentral_job import Job, job, spread
from simkit.decentral_lines import PAYLOAD, RELAY_SHARE
from simkit.decentral_report import money
from simkit.decentral_search import Asked, crew_of
from simkit.decentral_step import Crew, Rules
from simkit.errors import RefusedError, unknown
from simkit.evaluate import HOST_KERNEL_S
from simkit.memory import CONTEXT_BYTES, CONTEXT_DEFAULT_BYTES, FRAGMENTATION, Memory
from simkit.memory_facts import WORKSPACE_BYTES
from simkit.methods import OWN
from simkit.price import hosted
from simkit.report import Report, Term
from simkit.roofline import Array
from simkit.spec import load
from simkit.spec.model import TransformerSpec
from simkit.spec.peers import Peer
from simkit.spec.plan import DTYPE_BYTES
from simkit.spec.priors import DEFAULT_FRACTION, prior
from simkit.spec.scenario import Scenario
from simkit.timeline import Timeline
from simkit.units import GIB, format_bytes, format_s

CLIENT = "x86-cpu"
"""Where embedding and head are computed: a client without GPU."""
SPREAD = (0.75, 1.35)
"""90 % interval as a factor: assumed."""
INT8_PRODUCT_S = 0.99e-3
"""Seconds of one LLM.int8() product at small batch, launches alone; see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """hop_s: of every block, beside its kernels; relayed: the client passes activations from server to server;
    cache_passes: how often a step moves the cache. product_s: of a quantised product, launches alone."""

    hop_s: float
    relayed: bool
    cache_passes: float
    product_s: Mapping[str, float]


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "petals": Engine(hop_s=2.8e-3, relayed=True, cache_passes=6.0, product_s={"int8": INT8_PRODUCT_S}),
        "petals-merged": Engine(hop_s=0.2e-3, relayed=False, cache_passes=6.0, product_s={"int8": INT8_PRODUCT_S}),
        "chain": Engine(hop_s=0.0, relayed=False, cache_passes=1.0, product_s={}),
    }
)
"""``petals``: 1.0, which the published table measured. ``petals-merged``: one queue a server and server-to-server
messages (2.0); its hop is assumed. ``chain``: nothing but kernels and messages, a bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Who serves which units, and the seconds of one token. served: (peer, begin, end); block_s: by server."""

    served: tuple[tuple[int, int, int], ...]
    block_s: tuple[float, ...]
    message_s: float
    client_s: float

    @property
    def tpot_s(self) -> float:
        return sum(self.block_s) + self.message_s + self.client_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is generated: sequences together, tokens in the cache already, tokens to come, bytes of a weight."""

    batch: int
    prompt: int
    output: int
    quant: str
    engine: str

    @property
    def weight_bytes(self) -> float:
        return DTYPE_BYTES[self.quant] if self.quant != "none" else 2.0


def inference(scenario: Scenario) -> Report:
    """The answer for a chain of peers that generates."""
    refuse(scenario, ("tp", "cp", "ep", "zero", "offload", "peft", "staleness", "wiring", "inner_steps", "exchange"),
           "does not belong to inference over peers")  # fmt: skip
    resolved, peers, notes = base(scenario)
    spec = resolved.model.spec
    if not isinstance(spec, TransformerSpec) or spec.kind != "decoder":
        raise RefusedError(f"{resolved.model.name} is no decoder: a chain of peers generates with decoders")
    request = Request(
        batch=scenario.get("batch", 1), prompt=scenario.get("prompt_len", 128), output=scenario.get("output_len", 1),
        quant=scenario.get("quant", "none"), engine=scenario.get("engine", "petals"),
    )  # fmt: skip
    if request.engine not in ENGINES:
        raise unknown("engine", request.engine, ENGINES, file=scenario.file)
    for name, value in (("batch", 1), ("prompt_len", 128), ("engine", "petals"), ("quant", "none")):
        if not scenario.given(name):
            notes.append(f"{name} = {value}: none given")
    notes = [n for n in notes if not n.startswith(("optimizer", "attention", "seq_len"))]
    plan = replace(resolved.plan, micro_batch=request.batch, seq_len=1, grad_accum=1, dp=1, attention="flash",
                   optimizer="none", recompute="none")  # fmt: skip
    resolved = replace(resolved, plan=plan)
    question = Asked(resolved=resolved, peers=peers, rules=Rules(), samples=1)
    crew = crew_of(question, job(resolved, plan))
    chain, fits = best_chain(crew, spec, request)
    return _report(scenario, crew, spec, request, chain, fits, notes)


def stage_s(crew: Crew, spec: TransformerSpec, request: Request, kind: int) -> Array:
    """(n+1, n+1) seconds of units i..j-1 for one token of every sequence, on one kind of device.

    The embedding and the head are the client's: units without a block take nothing.
    """
    job_, engine = crew.job, ENGINES[request.engine]
    device = crew.kinds[kind]
    inside = np.array([n[0].isdigit() for n in job_.units.names])
    weights = job_.units.elements * inside * request.weight_bytes
    per_block = np.bincount(_blocks(job_)[inside], minlength=spec.blocks) if inside.any() else np.zeros(spec.blocks)
    share = np.where(inside, 1.0 / np.maximum(per_block[np.maximum(_blocks(job_), 0)], 1.0), 0.0)
    rate = device.priced.law.peak_flops * device.priced.law.ceiling * device.priced.law.sustained
    busy = np.maximum(weights / device.memory_Bps, 2.0 * job_.units.elements * inside * request.batch / rate)
    context = request.prompt + (request.output - 1) / 2.0
    cache = 2.0 * spec.kv_heads * spec.head_dim * 2.0 * context * request.batch
    cached = share * (cache * engine.cache_passes / device.memory_Bps + engine.hop_s)
    f = job_.program.forward
    eager = np.array([not n.endswith((".cast", "dropout")) for n in f.names], dtype=float)
    launches = job_.units.forward_rows @ (f.kernels * eager) * inside * HOST_KERNEL_S
    product = engine.product_s.get(request.quant, 0.0)
    launches = launches + _products(job_) * inside * product
    return hosted(spread(busy), spread(launches)) + spread(cached)  # type: ignore[no-any-return]


def _blocks(found: Job) -> Any:
    """The block of each unit, -1 outside."""
    return np.array([int(n.partition(".")[0]) if n[0].isdigit() else -1 for n in found.units.names])


def _products(found: Job) -> Array:
    """Matrices of each unit."""
    owner, out = found.unit_of_tensors, np.zeros(found.count)
    for at, tensor in enumerate(found.model.tensors):
        if len(tensor.shape) > 1 and tensor.role != "embedding":
            out[owner[at]] += 1.0
    return out


def cache_bytes(spec: TransformerSpec, request: Request) -> float:
    """Keys and values of one block."""
    return 2.0 * spec.kv_heads * spec.head_dim * 2.0 * (request.prompt + request.output) * request.batch


def best_chain(crew: Crew, spec: TransformerSpec, request: Request) -> tuple[Chain, bool]:
    """The chain of the least latency under memory, and whether there is one; without memory limits where there is
    none. A server more costs its messages, so no more are used than memory asks for."""
    n = crew.job.count
    per_kind = [stage_s(crew, spec, request, k) for k in range(len(crew.kinds))]
    inside = np.array([x[0].isdigit() for x in crew.job.units.names])
    blocks = _blocks(crew.job)
    own = np.bincount(blocks[inside], minlength=spec.blocks)
    share = np.where(inside, 1.0 / np.maximum(own[np.maximum(blocks, 0)], 1.0), 0.0)
    need = spread(crew.job.units.elements * inside * request.weight_bytes + share * cache_bytes(spec, request))
    need = need * (1.0 + FRAGMENTATION)
    order = sorted(range(len(crew.peers)), key=lambda p: (-crew.peers[p].flops, p))
    for limited in (True, False):
        best = np.full(n + 1, np.inf)
        best[0], choice = 0.0, []
        for p in order:
            cost = per_kind[int(crew.kind[p])] * crew.slow[p] + _messages(crew.peers[p], spec, request)
            cost = np.where(need <= _room(crew, p), cost, np.inf) if limited else cost
            cost = cost + np.tril(np.full((n + 1, n + 1), np.inf), -1)
            np.fill_diagonal(cost, 0.0)
            reached = best[:, None] + cost
            came = reached.argmin(axis=0)
            best = reached[came, np.arange(n + 1)]
            choice.append(came)
        if np.isfinite(best[n]):
            return _traced(crew, spec, request, per_kind, order, choice), limited
    raise AssertionError("a chain without limits always exists")


def _traced(crew: Crew, spec: TransformerSpec, request: Request, per_kind: list[Array], order: list[int],
            choice: list[Any]) -> Chain:  # fmt: skip
    served: list[tuple[int, int, int]] = []
    at = crew.job.count
    for p, came in zip(reversed(order), reversed(choice), strict=True):
        begin = int(came[at])
        if begin < at:
            served.append((p, begin, at))
        at = begin
    served.reverse()
    return Chain(
        served=tuple(served),
        block_s=tuple(float(per_kind[int(crew.kind[p])][i, j] * crew.slow[p]) for p, i, j in served),
        message_s=_last(crew, served, spec, request)
        + sum(_messages(crew.peers[p], spec, request) for p, _, _ in served),
        client_s=client_s(spec, request),
    )  # fmt: skip


def _messages(peer: Peer, spec: TransformerSpec, request: Request) -> float:
    """A request to the server and, where the client relays, its answer; the client is at the backbone with a line of
    its own that does not bind."""
    nbytes = request.batch * spec.hidden * 2.0
    there = _way(peer) + nbytes / (peer.down_Bps * _payload(peer))
    back = _way(peer) + nbytes / (peer.up_Bps * _payload(peer))
    return there + back if ENGINES[request.engine].relayed else there


def _last(crew: Crew, served: list[tuple[int, int, int]], spec: TransformerSpec, request: Request) -> float:
    """The last answer, where servers pass activations on themselves."""
    if ENGINES[request.engine].relayed or not served:
        return 0.0
    peer = crew.peers[served[-1][0]]
    return _way(peer) + request.batch * spec.hidden * 2.0 / (peer.up_Bps * _payload(peer))


def _way(peer: Peer) -> float:
    """One way between two peers of this latency: the client is as far from the backbone as the server."""
    return 2.0 * peer.latency_s * (2.0 if peer.relay else 1.0)


def _payload(peer: Peer) -> float:
    return PAYLOAD * (RELAY_SHARE if peer.relay else 1.0)


def client_s(spec: TransformerSpec, request: Request) -> float:
    """Embedding and head of one token on a client without GPU: the head's matrix once through memory."""
    device = load.device(CLIENT)
    rate = device.memory_Bps * prior("memory", "fraction", DEFAULT_FRACTION)
    compute = 2.0 * spec.vocab * spec.hidden * request.batch / device.peak_flops["fp32"]
    return max(2.0 * spec.vocab * spec.hidden / rate, compute)


def _room(crew: Crew, p: int) -> float:
    device = crew.kinds[int(crew.kind[p])].device
    context = float(CONTEXT_BYTES.get(device.architecture, CONTEXT_DEFAULT_BYTES)) if device.kind == "gpu" else 0.0
    return crew.peers[p].memory_bytes - context - WORKSPACE_BYTES - crew.job.reserve_bytes


def ttft_s(crew: Crew, spec: TransformerSpec, request: Request, chain: Chain) -> float:
    """The prompt through the chain: products at the sustained rate, its hidden states over every line."""
    tokens = float(request.prompt * request.batch)
    total = chain.client_s
    for p, i, j in chain.served:
        kind = crew.kinds[int(crew.kind[p])]
        inside = np.array([n[0].isdigit() for n in crew.job.units.names[i:j]])
        flops = 2.0 * float((crew.job.units.elements[i:j] * inside).sum()) * tokens
        law = kind.priced.law
        took = flops / (law.peak_flops * law.ceiling * law.sustained) * float(crew.slow[p])
        total += max(took, float(stage_s(crew, spec, request, int(crew.kind[p]))[i, j]) * float(crew.slow[p]))
        total += _messages(crew.peers[p], spec, replace(request, batch=max(int(tokens), 1)))
    return total


def _memory(crew: Crew, spec: TransformerSpec, request: Request, chain: Chain, fits: bool) -> Memory:
    rows = []
    for p, i, j in chain.served:
        names = crew.job.units.names[i:j]
        inside = np.array([n[0].isdigit() for n in names])
        weights = float((crew.job.units.elements[i:j] * inside).sum()) * request.weight_bytes
        blocks = len({n.partition(".")[0] for n in names if n[0].isdigit()})
        rows.append((p, weights, blocks * cache_bytes(spec, request)))
    p, weights, cache = max(rows, key=lambda r: r[1] + r[2] - crew.peers[r[0]].memory_bytes)
    device = crew.kinds[int(crew.kind[p])].device
    context = float(CONTEXT_BYTES.get(device.architecture, CONTEXT_DEFAULT_BYTES)) if device.kind == "gpu" else 0.0
    allocated = weights + cache + WORKSPACE_BYTES
    reserved = allocated + (weights + cache) * FRAGMENTATION
    offered = crew.peers[p].memory_bytes
    why = "" if fits else f"needs {format_bytes(reserved + context)}, {device.title} offers {format_bytes(offered)}"
    return Memory(
        items_bytes={"weights": weights, "cache": cache, "workspace": float(WORKSPACE_BYTES),
                     "fragmentation": reserved - allocated, "context": context},
        allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=reserved + context,
        capacity_bytes=offered - context - crew.job.reserve_bytes, fits=fits, why_not=why,
        advice=lambda: "" if fits else "more peers, or quant = int8 or nf4",
    )  # fmt: skip


def _report(scenario: Scenario, crew: Crew, spec: TransformerSpec, request: Request, chain: Chain, fits: bool,
            notes: list[str]) -> Report:  # fmt: skip
    tpot = chain.tpot_s
    used = len(chain.served)
    terms = {"forward_s": sum(chain.block_s), "message_s": chain.message_s, "client_s": chain.client_s}
    busy = np.zeros(len(crew.peers))
    for (p, _, _), took in zip(chain.served, chain.block_s, strict=True):
        busy[p] = took / tpot
    figures, said = money(tuple(crew.peers), crew, busy, scenario, tpot, request.batch, request.batch)
    worst = max(terms, key=lambda n: terms[n])
    words = {"forward_s": f"the blocks of {used} servers", "message_s": f"messages to and from {used} servers",
             "client_s": "embedding and head on the client"}  # fmt: skip
    values = {"model": crew.job.model.name, "task": "inference", "method": "decentralized",
              "cluster": _cluster(crew), "precision": crew.job.plan.precision, "pp": used, "batch": request.batch,
              "prompt_len": request.prompt, "output_len": request.output, "quant": request.quant,
              "engine": request.engine, "seed": scenario.get("seed", 0)}  # fmt: skip
    values |= {k: v for k, v in scenario.values.items() if (k in OWN or k == "inter") and k not in values}
    chains = max(len(crew.peers) // max(used, 1), 1)
    rate = request.batch / tpot
    extras = {
        "tpot_s": tpot, "ttft_s": ttft_s(crew, spec, request, chain), "output_tokens_per_s": rate * chains,
        "output_tokens_per_s_per_chain": rate, "chains": chains,
        "kv_bytes_per_token": spec.blocks * cache_bytes(spec, replace(request, prompt=0, output=1, batch=1)),
        "utilisation": {"mean": float(busy.mean()), "min": float(busy.min()), "max": float(busy.max())},
        "throughput_timeline": [{"time_s": tpot, "samples_per_s": rate}],
        "goodput": {"goodput": 1.0, "samples_per_s": rate}, "lost_work_fraction": 0.0, "recoveries": 0,
        "interval_90": {"tpot_s": [tpot * SPREAD[0], tpot * SPREAD[1]]},
        "per_stage": [{"stage": r, "peer": crew.peers[p].name, "device": crew.peers[p].device,
                       "units": f"{crew.job.units.names[i]} to {crew.job.units.names[j - 1]}", "compute_s": took}
                      for r, ((p, i, j), took) in enumerate(zip(chain.served, chain.block_s, strict=True))],
    }  # fmt: skip
    return Report(
        scenario=values, iteration_time_s=tpot, samples_per_s=rate, tokens_per_s=rate, breakdown=terms,
        memory=_memory(crew, spec, request, chain, fits),
        ledger=tuple(Term(name=n, seconds=v, bound="line" if n == "message_s" else "memory", evidence="assumed")
                     for n, v in terms.items()),
        interval_90={"iteration_time_s": (tpot * SPREAD[0], tpot * SPREAD[1])},
        bottleneck=f"{words[worst]}: {terms[worst] / tpot:.0%} of a token", cost=figures,
        groups={"chain": f"{used} servers, " + ("each answers the client" if ENGINES[request.engine].relayed else
                                                "each passes on to the next")},
        assumptions=(*notes, *said, f"embedding and head on a client without GPU ({load.device(CLIENT).title})",
                     "one request at a time: servers do not wait for other clients"),
        facts={"params": crew.job.model.params, "gpus": len(crew.peers), "activation_bytes": spec.hidden * 2.0},
        timeline=Timeline(end_s=tpot, breakdown=terms, busy_s={"compute": terms["forward_s"], "comm": chain.message_s},
                          comm_end_s=np.zeros(0)),
        device_names=tuple(dict.fromkeys(k.device.title for k in crew.kinds)),
        sections=(("A chain of peers", (
            ("Per token", f"{format_s(tpot)}, {rate:.3g} tokens/s a chain"),
            ("First token", f"{format_s(extras['ttft_s'])} for a prompt of {request.prompt}"),  # type: ignore[arg-type]
            ("Servers", f"{used} of {len(crew.peers)} peers a chain, {chains} such chains, cache of "
             f"{format_bytes(float(extras['kv_bytes_per_token']))} a token"),  # type: ignore[arg-type]
        )),),
        extras=extras,
    )  # fmt: skip


def _cluster(crew: Crew) -> str:
    counted: dict[str, int] = {}
    for p in crew.peers:
        counted[p.device] = counted.get(p.device, 0) + 1
    return "+".join(f"{n}x1x{d}" for d, n in counted.items())


__all__ = ["ENGINES", "GIB", "Chain", "Engine", "Request", "best_chain", "inference", "stage_s"]
