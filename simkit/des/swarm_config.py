"""What a simulated swarm is given, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from simkit.churn._common import Churn
from simkit.errors import InputError
from simkit.spec.peers import Peer
from simkit.spec.stage import StageCost

ARRIVALS = ("open", "recruit")
SCHEDULES = ("endless", "1f1b")
MOST_CHANGES = 1_000_000
"""Comings, outages, slowdowns and checkpoints a run may be expected to have: at 0.1 to 0.4 ms each, some minutes."""
BROKER_LAWS = ("deterministic", "exponential", "uniform")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwarmConfig:
    """A job over peers, and everything that happens to them. Seconds and bytes throughout.

    The job: stages of one pipeline; pipelines (in data parallel); micro_batches a step has in each pipeline;
    steps_per_round steps between two exchanges, each of exchange_s; wiring: a file of `simkit.des.wiring`; schedule:
    ``endless`` (no bound on micro-batches in flight) or ``1f1b``; stretch: exact step over its closed form.
    peers: those at the start, in this order, and the mix that later ones are drawn from; holders: per pipeline the
    indices into `peers` of who holds each stage (else in order); backup_pool: peers beyond them.

    Coming and going: churn; arrivals ``open`` (Poisson, as many as leave on average: volunteers) or ``recruit`` (the
    broker replaces whom it lost after an exponential time of mean recruit_s); graceful: share that announces its leave
    notice_s ahead; joins: (time, how many come at once).
    Finding out: a heartbeat every heartbeat_s, given up after `misses` of them; the broker answers one request at a
    time, in broker_s on average by broker_law; a newcomer needs startup_s before it can be used.
    State: a checkpoint every checkpoint_interval_s to checkpoint_servers of checkpoint_Bps each; it stops the job for
    checkpoint_s (0: written in the background, on its share of the uploads).
    Slow peers: each slows down by slow_factor every slow_every_s for slow_s (exponential means).
    Policies by name; patience_s and hysteresis: how long and by how much something must be better before peers move.
    latency_s: one way, between regions, on top of the peers' own; relays of relay_Bps each way for firewalled peers.
    bins: samples over the horizon; record: keep what happened to each peer, for traces.
    """

    stages: StageCost
    peers: tuple[Peer, ...]
    churn: Churn
    horizon_s: float
    pipelines: int = 1
    micro_batches: int = 1
    steps_per_round: int = 1
    exchange_s: float = 0.0
    wiring: str = "fixed"
    schedule: str = "endless"
    stretch: float = 1.0
    holders: tuple[tuple[int, ...], ...] | None = None
    backup_pool: int = 0
    arrivals: str = "open"
    recruit_s: float = 600.0
    graceful: float = 0.0
    notice_s: float = 120.0
    joins: tuple[tuple[float, int], ...] = ()
    heartbeat_s: float = 10.0
    misses: int = 3
    broker_s: float = 0.01
    broker_law: str = "deterministic"
    startup_s: float = 30.0
    checkpoint_interval_s: float = 3600.0
    checkpoint_s: float = 0.0
    checkpoint_servers: int = 1
    checkpoint_Bps: float = 1.25e8
    slow_every_s: float = math.inf
    slow_factor: float = 3.0
    slow_s: float = 600.0
    placement: str = "fastest"
    replacement: str = "replica"
    pool: str = "fixed"
    deadline: str = "none"
    patience_s: float = 300.0
    hysteresis: float = 0.1
    latency_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    relays: int = 1
    relay_Bps: float = 1.25e8
    bins: int = 96
    seed: int = 0
    record: bool = False

    def __post_init__(self) -> None:
        counts = {"pipelines": 1, "micro_batches": 1, "steps_per_round": 1, "misses": 1, "checkpoint_servers": 1,
                  "bins": 1, "backup_pool": 0, "relays": 1}
        for name, least in counts.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError("is no count", key=name, value=value, hint=f"a whole number of at least {least}")
        positive = ("horizon_s", "heartbeat_s", "checkpoint_interval_s", "checkpoint_Bps", "slow_every_s", "slow_s",
                    "relay_Bps", "recruit_s", "slow_factor", "stretch")
        free = ("exchange_s", "notice_s", "broker_s", "startup_s", "checkpoint_s", "patience_s", "hysteresis")
        for name in (*positive, *free):
            value = getattr(self, name)
            if not value >= 0.0 or (name in positive and value == 0.0):
                what, hint = ("positive", "above 0") if name in positive else ("0 or more", "of at least 0")
                raise InputError(f"is not {what}", key=name, value=value, hint=f"give a value {hint}")
        if not math.isfinite(self.horizon_s):
            raise InputError("is not finite", key="horizon_s", value=self.horizon_s, hint="give a finite time")
        if not 1.0 <= self.slow_factor <= 1e6:
            raise InputError("is no slowdown", key="slow_factor", value=self.slow_factor, hint="between 1 and 1e6")
        if not 0.0 <= self.graceful <= 1.0:
            raise InputError("is no share", key="graceful", value=self.graceful, hint="between 0 and 1")
        for name, known in (("arrivals", ARRIVALS), ("schedule", SCHEDULES), ("broker_law", BROKER_LAWS)):
            if getattr(self, name) not in known:
                raise InputError("is not known", key=name, value=getattr(self, name), hint=f"one of {', '.join(known)}")
        if not all(float(x) > 0.0 for x in self.stages.compute_s):
            raise InputError("has a stage without work", key="stages", hint="merge it with its neighbour")
        self._check_peers()
        check_changes(self, self.online)

    def _check_peers(self) -> None:
        if not self.peers:
            raise InputError("is empty", key="peers", hint="give at least one peer")
        for peer in self.peers:
            if not peer.flops > 0.0 or not peer.up_Bps > 0.0 or not peer.down_Bps > 0.0:
                raise InputError("has no rate, no upload or no download", key="peer", value=peer.name)
        if self.holders is None:
            return
        used = [i for chain in self.holders for i in chain]
        if len(self.holders) != self.pipelines or any(len(chain) != self.stages.stages for chain in self.holders):
            raise InputError("does not name a peer for each stage of each pipeline", key="holders")
        if len(set(used)) != len(used) or not all(0 <= i < len(self.peers) for i in used):
            raise InputError("names a peer twice or one that is not there", key="holders")

    @property
    def slots(self) -> int:
        """Places to be filled: stages x pipelines."""
        return self.stages.stages * self.pipelines

    @property
    def online(self) -> int:
        """Peers there on average."""
        return len(self.peers) + self.backup_pool


def expected_changes(cfg: SwarmConfig, online: float) -> dict[str, float]:
    """Changes to expect in a run with that many peers there, by the field of `SwarmConfig` they come from.

    Comings N T/m (renewal theory; those of a trace are counted); of outages T/e and those whom they take, each at most
    once in e r/s + d (r regions, share s, length d); slowdowns N T/(between + length); checkpoints and samples.
    """
    churn, horizon_s = cfg.churn, cfg.horizon_s
    visits = churn.visits()
    comings = online * horizon_s / churn.mean_session_s() if visits is None else float(len(visits))
    if (rate := churn.outages_per_s()) > 0.0 and visits is None:
        taken_hz = rate * churn.p["share"] / len({peer.region for peer in cfg.peers})
        comings += horizon_s * rate + online * horizon_s * taken_hz / (1.0 + taken_hz * churn.p["duration"])
    return {
        "churn": comings, "slow_every_s": online * horizon_s / (cfg.slow_every_s + cfg.slow_s),
        "joins": float(sum(count for _, count in cfg.joins)), "backup_pool": online,
        "checkpoint_interval_s": horizon_s / (cfg.checkpoint_interval_s + cfg.checkpoint_s), "bins": float(cfg.bins),
    }  # fmt: skip


def check_changes(cfg: SwarmConfig, online: float) -> None:
    """Raises InputError, which names the field that most changes come from, where a run would have too many."""
    parts = expected_changes(cfg, online)
    total = math.fsum(parts.values())
    if total <= MOST_CHANGES:
        return
    name = max(parts, key=lambda key: parts[key])
    value = {"churn": cfg.churn.text, "joins": int(parts["joins"])}.get(name) or getattr(cfg, name)
    raise InputError(
        f"would mean about {total:.2g} changes in {cfg.horizon_s / 3600.0:g} h with {online:g} peers, above the "
        f"{MOST_CHANGES:,} that are simulated", key=name, value=value,
        hint=f"give a {'longer time' if name.endswith('_s') or name == 'churn' else 'smaller number'}, fewer peers "
        "or fewer hours",
    )  # fmt: skip
