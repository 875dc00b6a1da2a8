"""Every tensor of a synthetic model: its type, and gains that keep activations at unit size.

Each tensor has its own generator, keyed by seed and name, so its bytes depend on neither the order
nor the presence of other tensors.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ds4flow.gguf import TensorInfo
from ds4flow.model.config import ModelConfig
from ds4flow.model.slots import Slot, hyper_slots, layer_slots, trunk_slots, vectors
from ds4flow.synth.blocks import nbytes_of, random_table, random_tensor, unit_diagonal
from ds4flow.synth.presets import Recipe

MTP = "mtp.0."
_PREFIX = re.compile(r"(blk\.\d+|mtp\.0)\.")
# Unit-variance input through gate and up of unit gain: the root mean square of silu(g) * u.
_GATED = 0.6

# Of vectors: mean and standard deviation; the first match decides.
_VECTORS = (
    (r"enorm", 1.0, 0.02),
    (r"(attn_kv_a|attn_compressor)_norm", 1.6, 0.15),  # sharper attention than unit keys give
    (r".*norm", 1.0, 0.1),
    (r"attn_sinks", 1.0, 1.0),
    (r"exp_probs_b", 0.0, 0.1),  # changes selections, and leaves the experts about equally busy
    (r".*_scale", 0.8, 0.1),
    (r"(output_hc|hc_head)_base", 0.2, 0.1),
    (r"hc_.*_base", 0.25, 0.75),
    (r".*_ape", 0.0, 0.7),
)
# Of matrices: gain, so that a unit input gives an output of this size; 1 where nothing matches.
_GAINS = (
    (r"h_proj", 0.1),
    (r"attn_output_a", 1.5),
    (r".*compressor_gate|ffn_gate_inp", 1.5),
)


class Plan(NamedTuple):
    """One tensor to make: its entry in the file and the gain or deviation of its weights."""

    info: TensorInfo
    mean: float
    std: float
    key: str  # of its generator; tensors that share a key share their values


def trunk_plan(recipe: Recipe) -> list[Plan]:
    """The tensors of a main file, in file order; UsageError when a width does not fit its type."""
    return [_plan(slot, recipe) for slot in trunk_slots(recipe.config)]


def mtp_plan(recipe: Recipe) -> list[Plan]:
    """The tensors of the MTP support file."""
    c = recipe.config
    slots = [
        Slot(f"{MTP}e_proj.weight", (c.dim, c.dim)),
        Slot(f"{MTP}h_proj.weight", (c.dim, c.dim)),
        *vectors([f"{MTP}enorm", f"{MTP}hnorm", f"{MTP}norm"], c.dim),
        *hyper_slots(f"{MTP}hc_head", c, head=True),
        *layer_slots(MTP, c, c.mtp_ratio, hashed=False),
    ]
    return [_plan(slot, recipe) for slot in slots]


def tensor(plan: Plan, config: ModelConfig, seed: int) -> np.ndarray:
    """The tensor as stored: typed, or uint8 `[.., bytes per row]`."""
    rng = generator(seed, plan.key)
    info = plan.info
    if info.type == "I32":
        return random_table(rng, config.vocab, config.experts_used, config.experts)
    data = random_tensor(rng, info.type, info.shape, plan.std)
    if plan.mean:  # vectors only, all of them F32
        data += np.float32(plan.mean)
    if info.name == f"{MTP}e_proj.weight":
        # passes the embedding on, as the trunk's streams do, so that both heads see about the same
        unit_diagonal(data)
    return data


def generator(seed: int, key: str) -> np.random.Generator:
    """The generator of one named thing."""
    return np.random.Generator(np.random.PCG64([seed, *key.encode()]))


def _plan(slot: Slot, recipe: Recipe) -> Plan:
    name = _PREFIX.sub("", slot.name, count=1)
    mtp = slot.name.startswith(MTP)
    kind = _type(name, slot.kind, recipe, mtp)
    size = 4 * int(np.prod(slot.shape)) if kind == "I32" else nbytes_of(kind, slot.shape)
    info = TensorInfo(slot.name, kind, slot.shape, 0, size)
    if slot.kind == "vector":
        mean, std = next((m, s) for pattern, m, s in _VECTORS if re.match(pattern, name))
        return Plan(
            info, mean, std, "output_norm" if slot.name == f"{MTP}norm.weight" else slot.name
        )
    return Plan(info, 0.0, _std(name, slot.shape, recipe), slot.name)


def _type(name: str, kind: str, recipe: Recipe, mtp: bool) -> str:
    if kind == "table":
        return "I32"
    if "_ape." in name:
        return recipe.types["side"]
    if kind == "vector":
        return "F32"
    if re.match(r"ffn_(gate|up|down)_exps\.", name):
        if mtp:
            return recipe.types["mtp_experts"]
        return recipe.types["down" if "down" in name else "gate_up"]
    if name in ("token_embd.weight", "output.weight"):
        return recipe.types["embed" if "embd" in name else "output"]
    if re.match(r"attn_(q_a|q_b|kv|output_a|output_b)\.|ffn_\w+_shexp\.|[eh]_proj\.", name):
        return recipe.types["dense"]
    return recipe.types["mtp_side" if mtp else "side"]


def _std(name: str, shape: tuple[int, ...], recipe: Recipe) -> float:
    """Standard deviation of a matrix's weights."""
    if name.startswith("token_embd"):
        return 1.0
    unit = shape[-1] ** -0.5
    if name.startswith("output.weight"):
        return recipe.logit_std * unit
    if name.startswith("attn_output_b"):
        return 1.5 * recipe.contribution * unit
    if name.startswith("ffn_down_"):
        return recipe.contribution / _GATED * unit
    if name.startswith("e_proj"):
        return 0.02 * unit
    return unit * next((gain for pattern, gain in _GAINS if re.match(pattern, name)), 1.0)
