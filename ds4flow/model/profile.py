"""Numerics profiles: which simulated quantisations of the cached rows are applied.

`official` is the arithmetic that the released weights were trained with; `plain` applies none and
is what llama.cpp and transformers compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4flow.errors import UsageError, near_match


@dataclass(frozen=True)
class Profile:
    """Switches of one numerics profile.

    `kv_fp8`: E4M3 round trip (blocks of 64, power-of-two scale) of the non-rotary channels of raw
    and compressed KV rows. `index_fp4`: Hadamard transform and E2M1 round trip (blocks of 32) of
    indexer queries and keys. `exact_angles`: rotary angles formed in float64; otherwise one float32
    product of position and frequency, as in the vendor's inference code.
    """

    name: str
    kv_fp8: bool
    index_fp4: bool
    exact_angles: bool


PROFILES = {
    "official": Profile("official", kv_fp8=True, index_fp4=True, exact_angles=False),
    "plain": Profile("plain", kv_fp8=False, index_fp4=False, exact_angles=True),
}


def find_profile(name: str) -> Profile:
    """Return the profile called `name`; UsageError with the known names otherwise."""
    if name not in PROFILES:
        raise UsageError(
            f"model.profile={name} is not a numerics profile",
            f"use one of: {', '.join(PROFILES)} {near_match(name, PROFILES)}".rstrip(),
        )
    return PROFILES[name]
