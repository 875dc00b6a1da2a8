"""Threads change the time only: equal bits for any number of them, asleep or awake."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.gguf import GgufFile
from ds4flow.kernels.cpu import CpuKernels, layout
from ds4flow.kernels.cpu.lanes import atomic_get, atomic_put, get, invoke, pause, put
from ds4flow.kernels.cpu.layout import CONTEXT_JOB_FIELDS, CONTEXT_RUNNER
from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.records import address
from ds4flow.kernels.cpu.threads import pool
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import find_profile
from ds4flow.model.trunk import Model
from ds4flow.quants import QTensor


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def config(golden_dir: Path) -> ModelConfig:
    return ModelConfig.from_gguf(GgufFile.open(golden_dir / "tiny-f32.gguf"))


@pytest.mark.parametrize("threads", [2, 3])
def test_large_products_have_the_same_bits(config, threads):
    profile = find_profile("plain")
    one = CpuKernels(config, profile, threads=1)
    many = CpuKernels(config, profile, threads=threads)
    for rows in (1, 513, 1031):
        big = QTensor("big", "F32", (rows, 1024), noise(rows, 1024))
        for m in (1, 3, 8):
            x = noise(m, 1024, seed=m)
            assert torch.equal(many.linear(x, big), one.linear(x, big))


def test_a_whole_model_has_the_same_bits_and_state(golden_dir):
    """Prefill, verify widths and single steps, long enough for the indexer to select."""
    file = GgufFile.open(golden_dir / "tiny-q4k.gguf")
    tokens = torch.randint(0, 300, (330,), generator=torch.Generator().manual_seed(1)).tolist()
    results = []
    for threads in (1, 2):
        model = Model.load(file, profile="official", kernels="cpu")
        kernels = CpuKernels(model.config, model.profile, threads=threads)
        kernels.prepare(list(model.matrices()))
        model.kernels = kernels
        cache = KVCache(model.config, context=400, draft_max=7)
        logits = []
        at = 0
        for width in (64, 64, 64, 64, 1, 2, 3, 4, 5, *[1] * 20):
            part = tokens[at : at + width]
            at += width
            logits.append(model.logits(model.forward(part, cache)))
            cache.commit(len(part))
        results.append((torch.cat(logits), cache.state_hash()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def wait_job(context: int, share: int, shares: int, thread: int) -> int:
    """A share that ends when the other thread has taken one, or after some seconds."""
    flags, turns = get(context + CONTEXT_JOB_FIELDS), 0
    atomic_put(flags + 8 * thread, 1)
    while atomic_get(flags + 8 * (1 - thread)) == 0 and turns < 1 << 26:
        turns += 1
        pause()
    return 0


def meet(context: int, flags: int, job: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    put(context + CONTEXT_JOB_FIELDS, flags)
    invoke(get(context + CONTEXT_RUNNER), (context, job))
    return 0


def test_a_worker_that_sleeps_wakes_during_the_call(config):
    """The call is a whole pass, so a worker that needed it to end would never help."""
    context = CpuKernels(config, find_profile("plain"), threads=2)._context
    control, deadline = pool(2).control, time.monotonic() + 60
    while not control[layout.CONTROL_SLEEPS // 8 + 1]:
        assert time.monotonic() < deadline, "the worker never fell asleep"
        time.sleep(0.01)
    flags = np.zeros(2, dtype=np.int64)
    context.call(library.address(meet), address(flags), library.address(wait_job))
    assert flags.tolist() == [1, 1]


def test_workers_fall_asleep_and_are_woken(config):
    kernels = CpuKernels(config, find_profile("plain"), threads=2)
    big = QTensor("big", "F32", (1031, 1024), noise(1031, 1024))
    x = noise(2, 1024)
    wanted = kernels.linear(x, big)
    control = pool(2).control
    times = layout.CONTROL_PARKED // 8  # counts how often the only worker fell asleep
    asleep = 0
    for _ in range(3):
        deadline = time.monotonic() + 60
        while control[times] == asleep:
            assert time.monotonic() < deadline, "the worker never fell asleep again"
            time.sleep(0.01)
        asleep = int(control[times])
        assert torch.equal(kernels.linear(x, big), wanted)
