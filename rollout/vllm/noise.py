"""The noise of a sampled token: a function of the episode's seed and the token's number, never of the batch. Pure."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014, fig. 14)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def generator_seed(seed: int, number: int) -> int:
    """What a generator is seeded with before token `number` (from 0) of the stream of `seed` is drawn; in [0, 2⁶³).

    Output `number` of SplitMix64 from the state mix(seed), by random access. The seed is mixed first, so that the streams of
    neighbouring seeds do not overlap.
    """
    state = _mix(seed & _MASK)
    return _mix((state + (number + 1) * _GOLDEN) & _MASK) >> 1
