"""What to make: dimensions, quantisation mix and gains of a synthetic model, by preset and by key.

Promise: a recipe either describes a model that the loader takes, or a UsageError says which key to
change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from ds4flow.errors import UsageError, near_match
from ds4flow.model.config import RATIOS, ModelConfig
from ds4flow.synth.blocks import TYPES
from ds4flow.synth.vocabulary import SMALLEST_VOCABULARY

PUBLISHED = {"embed": "F16", "output": "Q8_0", "dense": "Q8_0", "side": "F16"}
"""Weight types of the published two- and four-bit files, experts aside."""
Q2 = {**PUBLISHED, "gate_up": "IQ2_XXS", "down": "Q2_K"}
Q4 = {**PUBLISHED, "gate_up": "Q4_K", "down": "Q4_K"}
MTP = {"mtp_experts": "Q4_K", "mtp_side": "F32"}


@dataclass(frozen=True)
class Recipe:
    """One synthetic model.

    `types` maps a role (embed, output, dense, side, gate_up, down, mtp_experts, mtp_side) to a
    weight type: `dense` are attention projections and shared experts, `side` the compressors, the
    indexer, the router and the hyper-connections. `contribution` is the size of a block's output
    beside the streams' unit size: the smaller, the more the next token depends on the last one
    only, which the MTP block then guesses well. `logit_std` is that of the logits.
    """

    name: str
    config: ModelConfig
    types: Mapping[str, str] = field(default_factory=lambda: {**Q4, **MTP})
    contribution: float = 0.02
    logit_std: float = 3.0


def flash_ratios(layers: int) -> tuple[int, ...]:
    """Compression ratios in the published Flash order, and 0 for the MTP block."""
    return (*([0, 0] + [4, 128] * layers)[:layers], 0)


def _config(ratios: tuple[int, ...], **given: Any) -> ModelConfig:
    """A configuration with the published constants; `ratios` of the trunk layers alone."""
    clamp = (10.0,) * (len(ratios) + 1)
    values: dict[str, Any] = {
        "layers": len(ratios),
        "ratios": (*ratios, 0),
        "streams": 4,
        "sinkhorn": 20,
        "rope_dim": 64,
        "window": 128,
        "index_dim": 128,
        "experts_shared": 1,
        "expert_scale": 1.5,
        "expert_norm": True,
        "clamp": clamp,
        "clamp_shared": clamp,
        "eps": 1e-6,
        "eps_hc": 1e-6,
        "rope_base": 10000.0,
        "rope_base_compress": 160000.0,
        "yarn_factor": 16.0,
        "yarn_original": 65536,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "context_length": 65536,
    }
    return ModelConfig(**{**values, **given})


FLASH = _config(
    flash_ratios(43)[:-1],
    **{"dim": 4096, "vocab": 129280, "heads": 64, "head_dim": 512, "q_rank": 1024, "groups": 8},
    **{"o_rank": 1024, "index_heads": 64, "top_k": 512, "experts": 256, "experts_used": 6},
    **{"expert_dim": 2048, "hash_layers": 3, "context_length": 1048576},
)
"""DeepSeek-V4-Flash."""

_MEDIUM = _config(
    flash_ratios(12)[:-1],
    **{"dim": 1024, "vocab": 8192, "heads": 16, "head_dim": 256, "q_rank": 512, "groups": 4},
    **{"o_rank": 256, "index_heads": 16, "top_k": 128, "experts": 16, "experts_used": 4},
    **{"expert_dim": 512, "hash_layers": 3},
)
# A quarter of Flash's widths (of H * d too), so that every matrix keeps its share; fewer experts
# and layers, so that what is read per token is a large part of the file.
_SHARES = _config(
    (0, 4, 128, 4, 128, 4, 128, 4, 128),
    **{"dim": 1024, "vocab": 6656, "heads": 64, "head_dim": 128, "q_rank": 256, "groups": 8},
    **{"o_rank": 256, "index_heads": 32, "index_dim": 64, "top_k": 128, "experts": 48},
    **{"experts_used": 6, "expert_dim": 512, "hash_layers": 1},
)
_SLICE = replace(
    FLASH,
    layers=3,
    ratios=(0, 4, 128, 0),
    clamp=(10.0,) * 4,
    clamp_shared=(10.0,) * 4,
    vocab=16384,
    experts=16,
    hash_layers=1,
    context_length=65536,
)
_TINY = _config(
    (0, 0, 4, 128, 4),
    **{"dim": 256, "vocab": 384, "heads": 4, "head_dim": 128, "q_rank": 64, "groups": 2},
    **{"o_rank": 32, "index_heads": 4, "top_k": 8, "experts": 8, "experts_used": 2},
    **{"expert_dim": 256, "hash_layers": 1, "window": 32, "context_length": 8192},
)

PRESETS: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("medium", _MEDIUM),
        Recipe("flash-slice", _SLICE, {**Q2, **MTP}),
        Recipe("flash-shares", _SHARES, {**Q2, **MTP}),
        Recipe("tiny", _TINY, {**Q2, **MTP, "mtp_experts": "Q2_K"}, contribution=0.03),
    )
}

SYNTH_FLASH = Recipe("synth-flash", FLASH, {**Q2, **MTP})
"""What `ds4flow bench synth-flash` makes in memory. Not a preset of files: 87 GB."""

_HINTS = get_type_hints(ModelConfig)
_FIXED = ("clamp", "clamp_shared")  # set as one number each
_GAINS = ("contribution", "logit_std")
_POSITIVE = (
    *("dim", "heads", "head_dim", "q_rank", "groups", "o_rank", "window", "streams", "experts"),
    *("experts_used", "experts_shared", "expert_dim", "layers", "sinkhorn", "context_length"),
)
ROLES = tuple({**Q4, **MTP})
KEYS = (*(f.name for f in fields(ModelConfig)), *ROLES, *_GAINS)
"""Keys that change a recipe."""


def recipe(preset: str, changes: Mapping[str, str] | None = None) -> Recipe:
    """The preset with some keys changed; `changes` maps names of KEYS to their text.

    When `layers` changes and `ratios` does not, layers are cut off or continued in the order 4,
    128. Raises UsageError for unknown names and for values that give no model.
    """
    if preset not in PRESETS:
        raise UsageError(
            f"preset={preset} is not a synthetic model",
            near_match(preset, PRESETS) or f"use one of: {', '.join(PRESETS)}",
        )
    return changed(PRESETS[preset], changes or {})


def changed(base: Recipe, changes: Mapping[str, str]) -> Recipe:
    """A recipe with some keys changed, as `recipe` does."""
    unknown = [key for key in changes if key not in KEYS]
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not a key of a synthetic model",
            near_match(unknown[0], KEYS) or f"use one of {', '.join(KEYS)}",
        )
    types = {**base.types, **{key: changes[key].upper() for key in ROLES if key in changes}}
    gains = {key: _number(key, changes[key], float) for key in _GAINS if key in changes}
    config = _changed(base.config, {k: v for k, v in changes.items() if k in _HINTS})
    made = replace(base, config=config, types=types, **gains)
    _check(made)
    return made


def _changed(config: ModelConfig, changes: Mapping[str, str]) -> ModelConfig:
    values: dict[str, Any] = {}
    for key, text in changes.items():
        if key == "ratios":
            values[key] = tuple(_number(key, part, int) for part in text.strip("[]()").split(","))
        elif _HINTS[key] is bool:
            if text.lower() not in ("true", "false"):
                raise UsageError(f"{key}={text} is not true or false", f"use {key}=true or false")
            values[key] = text.lower() == "true"
        else:
            values[key] = _number(key, text, int if _HINTS[key] is int else float)
    layers = values.get("layers", len(values["ratios"]) if "ratios" in values else config.layers)
    ratios = values.get("ratios", config.ratios[: config.layers])
    if "ratios" in values and len(ratios) == layers + 1:
        ratios = ratios[:-1]  # the MTP block's own entry may be written, and is 0
    if "ratios" in values and len(ratios) != layers:
        raise UsageError(f"ratios has {len(ratios)} entries, layers is {layers}", "make them agree")
    while len(ratios) < layers:
        ratios = (*ratios, 128 if ratios and ratios[-1] == 4 else 4)
    values |= {"layers": layers, "ratios": (*ratios[:layers], 0)}
    for key in _FIXED:
        values[key] = (values.get(key, getattr(config, key)[0]),) * (layers + 1)
    return replace(config, **values)


def _number(key: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise UsageError(f"{key}={text} is not {wanted}", f"set {key} to {wanted}") from None
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{key}={text} is out of range", "use a positive number")
    return value


def _check(made: Recipe) -> None:
    c = made.config
    for role, name in made.types.items():
        if name not in TYPES:
            raise UsageError(
                f"{role}={name} is not a weight type that can be made",
                near_match(name, TYPES) or f"use one of {', '.join(TYPES)}",
            )
    rules = {f"{key} must be at least 1": getattr(c, key) >= 1 for key in _POSITIVE}
    rules |= {
        f"vocab={c.vocab} has no room for bytes and markers, {SMALLEST_VOCABULARY} in all": (
            c.vocab >= SMALLEST_VOCABULARY
        ),
        f"heads={c.heads} is not a multiple of groups={c.groups}": (
            c.groups > 0 and c.heads % c.groups == 0
        ),
        f"rope_dim={c.rope_dim} must be even and at most head_dim={c.head_dim}": (
            c.rope_dim % 2 == 0 and 0 < c.rope_dim <= c.head_dim
        ),
        f"index_dim={c.index_dim} must be a power of two from rope_dim={c.rope_dim}, index_heads "
        "and top_k positive, where a ratio is 4": (
            4 not in c.ratios
            or (
                c.index_dim >= max(c.rope_dim, 32)
                and c.index_dim & (c.index_dim - 1) == 0
                and min(c.index_heads, c.top_k) >= 1
            )
        ),
        f"experts_used={c.experts_used} of experts={c.experts}": c.experts_used <= c.experts,
        f"hash_layers={c.hash_layers} of layers={c.layers}": c.hash_layers <= c.layers,
        f"ratios={c.ratios}; known ratios are 0, 4 and 128": set(c.ratios) <= set(RATIOS),
        f"yarn_factor={c.yarn_factor} is below 1": c.yarn_factor >= 1.0,
        "rope_base and rope_base_compress must be above 1": (
            min(c.rope_base, c.rope_base_compress) > 1.0
        ),
    }
    broken = [text for text, holds in rules.items() if not holds]
    if broken:
        raise UsageError(f"no model has these dimensions: {'; '.join(broken)}", "change these keys")
