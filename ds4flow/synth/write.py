"""Writing a synthetic model: two files that appear whole, at the same time, or not at all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.model.config import ModelConfig
from ds4flow.synth.metadata import mtp_writer, trunk_writer
from ds4flow.synth.presets import Recipe, recipe
from ds4flow.synth.weights import Plan, mtp_plan, tensor, trunk_plan
from ds4flow.traffic import Traffic, weight_traffic

HEADER_ROOM = 1 << 24  # for metadata when free space is compared with what will be written

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SynthReport:
    """What was written; `step` and `draft` are the weight bytes that a token and a draft read."""

    path: Path
    mtp_path: Path | None
    nbytes: int
    mtp_nbytes: int
    config: ModelConfig
    step: Traffic
    draft: Traffic | None
    seconds: float


def synthesize(
    preset: str | Recipe,
    path: str | Path,
    *,
    mtp_path: str | Path | None = None,
    seed: int = 0,
    changes: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> SynthReport:
    """Write a random-weight DeepSeek-V4 GGUF to `path` and its MTP block to `mtp_path`, if given.

    `preset` is a name of PRESETS, with `changes` (names of KEYS to their text), or a Recipe. The
    same recipe and seed give the same bytes. `progress` is called with (tensor name, bytes done,
    bytes in all). Raises UsageError for a recipe that gives no model and for a file that exists,
    Ds4FlowError when the files cannot be written; nothing is left behind then.
    """
    started = time.monotonic()
    made = preset if isinstance(preset, Recipe) else recipe(preset, changes)
    if seed < 0:
        raise UsageError(f"seed={seed} is negative", "use 0 or a larger number")
    plans = {Path(path).expanduser(): trunk_plan(made)}
    block: list[Plan] = []
    mtp = None if mtp_path is None else Path(mtp_path).expanduser()
    if mtp is not None:
        if mtp in plans:
            raise UsageError(f"{mtp} cannot hold both files", "give mtp_path another name")
        block = plans[mtp] = mtp_plan(made)
    writers = [trunk_writer(made, seed), mtp_writer(made, seed)]
    sizes = _write_all(plans, writers, made.config, seed, progress)
    trunk = [plan.info for plan in trunk_plan(made)]
    output = [info for info in trunk if info.name == "output.weight"]
    return SynthReport(
        path=next(iter(plans)),
        mtp_path=mtp,
        nbytes=sizes[0],
        mtp_nbytes=sizes[1] if mtp else 0,
        config=made.config,
        step=weight_traffic(trunk, made.config),
        draft=weight_traffic([*(p.info for p in block), *output], made.config) if mtp else None,
        seconds=time.monotonic() - started,
    )


def _write_all(
    plans: Mapping[Path, Sequence[Plan]],
    writers: Sequence[GGUFWriter],
    config: ModelConfig,
    seed: int,
    progress: Progress | None,
) -> list[int]:
    """Write each file under a passing name, then give all their own; returns their sizes."""
    total = sum(plan.info.nbytes for part in plans.values() for plan in part)
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in plans}
    done = 0
    try:
        for path in plans:
            _check_place(path, total)
        for (path, plan), writer in zip(plans.items(), writers, strict=False):
            done = _write(writer, parts[path], plan, config, seed, (progress, done, total))
        for path in plans:
            _refuse_existing(path)  # it may have appeared meanwhile
        for path, part in parts.items():
            part.rename(path)
    except OSError as error:
        raise Ds4FlowError(
            f"cannot write {next(iter(plans))}: {error.strerror or error}",
            f"make room for {total / 1e6:.0f} MB, or give another place; nothing was kept",
        ) from None
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return [path.stat().st_size for path in plans]


def _check_place(path: Path, total: int) -> None:
    _refuse_existing(path)
    if not path.parent.is_dir():
        raise UsageError(
            f"the folder {path.parent} does not exist", "make it, or give another place"
        )
    free = shutil.disk_usage(path.parent).free
    if free < total + HEADER_ROOM:
        raise Ds4FlowError(
            f"the files need {total / 1e6:.0f} MB, {path.parent} has {free / 1e6:.0f} MB free",
            "make room, give another place, or choose smaller dimensions",
        )


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists and is not overwritten", "give another name, or delete it")


def _write(
    writer: GGUFWriter,
    path: Path,
    plans: Sequence[Plan],
    config: ModelConfig,
    seed: int,
    state: tuple[Progress | None, int, int],
) -> int:
    """One file, with at most one tensor in memory. Returns the bytes done so far."""
    progress, done, total = state
    for plan in plans:
        info = plan.info
        writer.add_tensor_info(
            info.name,
            info.shape,
            np.dtype(np.float32),  # names the order of the shape only; the type is given
            info.nbytes,
            raw_dtype=GGMLQuantizationType[info.type],
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for plan in plans:
            writer.write_tensor_data(tensor(plan, config, seed))
            done += plan.info.nbytes
            if progress is not None:
                progress(plan.info.name, done, total)
        writer.flush()
        with path.open("rb") as file:
            os.fsync(file.fileno())
    finally:
        writer.close()
    return done
