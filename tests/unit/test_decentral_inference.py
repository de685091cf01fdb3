"""Chains of peers that generate: sums by hand, directions, placement under memory."""

from __future__ import annotations

import pytest

import simkit
from simkit.decentral_inference import ENGINES, Request, client_s
from simkit.errors import InputError, RefusedError
from simkit.spec.models import model

GIVEN = {"method": "decentralized", "task": "inference", "cluster": "4x3090", "model": "llama-2-13b", "quant": "int8",
         "prompt_len": 128, "engine": "chain"}  # fmt: skip


def chain(**extra: object):
    return simkit.predict(**{**GIVEN, "inter": "1Gb/s@5ms", **extra})


def test_a_chain_reads_its_weights_once_a_token() -> None:
    """Kernels alone: 12.7 G int8 weights of the blocks over 936 GB/s at the streaming share cannot take less."""
    found = chain()
    blocks = 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    assert found.breakdown["forward_s"] >= blocks / 936e9
    assert found.breakdown["forward_s"] <= 1.6 * blocks / 936e9
    assert sum(found.breakdown.values()) == pytest.approx(found.extras["tpot_s"])


def test_messages_are_latency_and_hidden_states() -> None:
    """One server, no relaying: there and back, 5 ms each way and 5,120 two-byte elements at 0.956 Gb/s."""
    found = chain(cluster="4x3090", quant="int4")
    assert len(found.extras["per_stage"]) == 1
    one = 0.005 + 5120 * 2 / (125e6 * 1448 / 1514)
    assert found.breakdown["message_s"] == pytest.approx(2 * one, rel=1e-6)


def test_no_more_servers_than_memory_asks_for() -> None:
    assert len(chain(quant="int8").extras["per_stage"]) == 1
    assert len(chain(quant="none").extras["per_stage"]) == 2
    assert chain(quant="none", cluster="4x3090").extras["chains"] == 2
    big = chain(model="llama-2-70b", quant="none", cluster="3x3090")
    assert not big.fits
    assert "offers" in big.memory.why_not


def test_directions() -> None:
    base = chain(engine="petals").extras["tpot_s"]
    assert chain(engine="petals", inter="1Gb/s@50ms").extras["tpot_s"] > base
    assert chain(engine="petals", inter="10Mb/s@5ms").extras["tpot_s"] > base
    assert chain(engine="petals", prompt_len=2048).extras["tpot_s"] > base
    assert chain(engine="petals-merged").extras["tpot_s"] < base
    many = chain(engine="petals", batch=16)
    assert many.extras["tpot_s"] >= base
    assert many.extras["output_tokens_per_s"] > 8 / base
    assert chain(engine="petals", prompt_len=1024).extras["ttft_s"] > chain(engine="petals").extras["ttft_s"]


def test_the_client_reads_the_head() -> None:
    """BLOOM: 250,880 x 14,336 two-byte elements at 307.2 GB/s cannot take less than 23 ms."""
    spec = model("bloom-176b").spec
    took = client_s(spec, Request(batch=1, prompt=1, output=1, quant="none", engine="chain"))
    assert 250_880 * 14_336 * 2 / 307.2e9 < took < 2 * 250_880 * 14_336 * 2 / 307.2e9


def test_a_chain_is_only_a_bound_for_an_engine() -> None:
    assert {e.hop_s >= 0.0 for e in ENGINES.values()} == {True}
    assert chain(engine="petals").extras["tpot_s"] > chain(engine="chain").extras["tpot_s"]


@pytest.mark.parametrize(("fields", "error", "said"), [
    ({"model": "bert-large"}, RefusedError, "decoder"),
    ({"engine": "petal"}, InputError, "petals"),
    ({"tp": 2}, RefusedError, "tp"),
])
def test_what_makes_no_sense_is_refused(fields: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        chain(**fields)
