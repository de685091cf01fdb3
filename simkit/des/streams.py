"""Random numbers by entity: each peer, outage or queue has its own stream, found by its name alone.

The stream of (seed, name) is the same whatever was created before it and on whichever process, so that one more spare
peer leaves the lives of all others as they were (common random numbers). Source: numpy's SeedSequence with a spawn key
per entity (M. E. O'Neill, HMC-CS-2014-0905; numpy.random documentation, "Parallel random number generation").
"""

from __future__ import annotations

from zlib import crc32

import numpy as np


class Streams:
    """Generators of one seed, by name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def of(self, *name: int | str) -> np.random.Generator:
        """The generator of an entity; asking twice gives two generators at the same start."""
        key = tuple(part if isinstance(part, int) else crc32(part.encode()) for part in name)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key)))


def child_seed(seed: int, replication: int) -> int:
    """The seed of one replication: 64 bits of the child sequence, independent of how many there are."""
    low, high = np.random.SeedSequence(seed, spawn_key=(replication,)).generate_state(2, np.uint32).tolist()
    return int(low) | int(high) << 32
