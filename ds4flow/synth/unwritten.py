"""A synthetic model without a file: what its headers would say, and its weights made where they
compute.

Promise: a recipe and a seed name the same model everywhere, by a digest; whether it fits is known
before a weight is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFWriter

from ds4flow.device import ON_THE_CPU, DeviceChoice, check_fits, free_bytes
from ds4flow.errors import ModelFileError, UsageError, near_match
from ds4flow.gguf import GgufFile, TensorInfo
from ds4flow.memory import available_bytes
from ds4flow.model.profile import find_profile
from ds4flow.model.trunk import BACKENDS, Model
from ds4flow.synth.metadata import mtp_writer, trunk_writer
from ds4flow.synth.presets import SYNTH_FLASH, Recipe, changed
from ds4flow.synth.rehearsal import MIXES, Synthesis
from ds4flow.synth.weights import mtp_plan, trunk_plan


class Unwritten(NamedTuple):
    """A recipe and the seed of its weights."""

    recipe: Recipe
    seed: int

    @classmethod
    def flash(cls, values: Mapping[str, Any]) -> Unwritten:
        """DeepSeek-V4-Flash, changed by `seed`, `mix` (of MIXES) and the keys of a recipe.

        A value of None leaves Flash's own. Raises UsageError for what gives no model.
        """
        given = {key: str(value) for key, value in values.items() if value is not None}
        mix, seed = given.pop("mix", "q2"), given.pop("seed", "0")
        if mix not in MIXES:
            raise UsageError(
                f"mix={mix} is not a mix of weight types",
                near_match(mix, MIXES) or f"use one of {', '.join(MIXES)}",
            )
        if not seed.isdecimal():
            raise UsageError(f"seed={seed} is not a number", "use 0 or a larger integer")
        recipe = changed(replace(SYNTH_FLASH, types=MIXES[mix]), given)
        planned(recipe)  # a width may not fit its type
        return cls(recipe, int(seed))

    def facts(self) -> dict[str, Any]:
        """What a run records of it: dimensions, weight types, gains, seed."""
        return {**asdict(self.recipe), "types": dict(self.recipe.types), "seed": self.seed}

    def sha256(self) -> str:
        """Hex digest of `facts`: equal for equal models."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()

    def headers(self) -> tuple[Described, Described]:
        """The main file and the MTP file that were never written."""
        recipe, seed = self.recipe, self.seed
        return (
            Described(recipe.name, trunk_writer(recipe, seed), planned(recipe)),
            Described(
                f"{recipe.name} MTP", mtp_writer(recipe, seed), [p.info for p in mtp_plan(recipe)]
            ),
        )


class Described(GgufFile):
    """The headers of a file; there are no bytes behind them."""

    def __init__(self, name: str, writer: GGUFWriter, tensors: Sequence[TensorInfo]) -> None:
        self.path, self.shards = Path(name), ()
        self.size = sum(info.nbytes for info in tensors)
        values = {key: item.value for part in writer.kv_data for key, item in part.items()}
        self.metadata = MappingProxyType(values)
        self.tensors = MappingProxyType({info.name: info for info in tensors})

    def array(self, name: str) -> np.ndarray:
        """Raise ModelFileError: nothing can be read."""
        raise ModelFileError(
            f"{self.path}: {name} exists on no disk", "use load=synth, which makes the weights"
        )


def planned(recipe: Recipe) -> list[TensorInfo]:
    """The trunk's tensors, as a file would list them."""
    return [plan.info for plan in trunk_plan(recipe)]


def made_model(
    unwritten: Unwritten,
    choice: DeviceChoice,
    profile: str,
    *,
    fix: str,
    mtp: bool = True,
    beside: int = 0,
    available: int | None = None,
) -> Model:
    """The model with random weights, made where it computes, without the MTP block if so wanted.

    `beside` are the bytes that the cache will need there, `available` those that may be taken
    (None: what is free). Raises Ds4FlowError with the sizes and `fix` when it does not all fit.
    """
    recipe, device = unwritten.recipe, torch.device(choice.name)
    infos = [*planned(recipe), *(plan.info for plan in mtp_plan(recipe) if mtp)]
    needed = sum(info.nbytes for info in infos) + max(info.nbytes for info in infos) + beside
    if available is None:
        available = available_bytes() if device.type == "cpu" else free_bytes(device)
    what = f"the weights {'and the cache ' if beside else ''}of {recipe.name}"
    check_fits(needed, available, what, fix)
    options = {} if choice.kernels in ON_THE_CPU else {"device": device}
    kernels = BACKENDS[choice.kernels](recipe.config, find_profile(profile), **options)
    adopt = getattr(kernels, "adopt", None)
    made = Synthesis(recipe.config, recipe.types, device, unwritten.seed, adopt)
    trunk = made.trunk()
    block = made.mtp() if mtp else None
    model = Model(recipe.config, trunk, block, find_profile(profile), kernels)
    if adopt is None:  # weights that were taken over are where they should be
        kernels.prepare(list(model.matrices()))
    return model
