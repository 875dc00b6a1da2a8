"""The steps of tools/gpu_check.sh: machine, parity, speed and profile on the GPU.

`--dry` runs the same steps small and uncaptured on torch operations, to test this file without a
GPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ds4flow.cache import KVCache
from ds4flow.gguf import GgufFile
from ds4flow.graph import DecodeGraph
from ds4flow.kernels.interface import Kernels
from ds4flow.kernels.reference import ReferenceKernels
from ds4flow.model.config import ModelConfig
from ds4flow.model.profile import find_profile
from ds4flow.model.trunk import Model
from ds4flow.model.weights import TrunkWeights
from ds4flow.speculate import argmax
from ds4flow.synth.presets import FLASH
from ds4flow.synth.rehearsal import Synthesis, shortened

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "golden"
NAMES = ("tiny-f32", "tiny-iq2", "tiny-q4k")
ACCEPTANCE = 0.8  # of the synthetic speed-up; measured acceptance needs real weights
WARM, TIMED = 3, 20


def machine(_: argparse.Namespace) -> None:
    """Versions, device and the bandwidth of a plain copy."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    if torch.cuda.is_available():
        import triton

        free, total = torch.cuda.mem_get_info()
        print(f"triton {triton.__version__}, {torch.cuda.get_device_name(0)}")
        print(f"memory: {free / 2**30:.1f} GiB free of {total / 2**30:.1f}")
        print(f"copy: {copy_bandwidth() / 1e12:.2f} TB/s")


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = min(seconds(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.numel() / best


def seconds(run) -> float:
    """Time of `run` on the device, or by the clock where there is none."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


# --- parity --------------------------------------------------------------------------------------


def parity(options: argparse.Namespace) -> None:
    """Greedy tokens of the golden models at depths 0..4, captured and eager, against the golden
    ones.

    Between depths and between graph and eager the visible cache must have equal bits.
    """
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES[:1] if options.dry else NAMES:
            with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
            bad += parity_of(name, Path(folder), options.dry)
    if bad:
        sys.exit(f"{len(bad)} differences: {bad[:5]}")


def parity_of(name: str, folder: Path, dry: bool) -> list[str]:
    """Differences of one golden model."""
    main = GgufFile.open(folder / f"{name}.gguf")
    mtp = GgufFile.open(folder / f"{name}.mtp-support.gguf")
    model = Model.load(main, mtp, profile="plain", kernels="reference" if dry else "gpu")
    data = np.load(GOLDEN / f"{name}.npz")
    prompt, length = data["tokens_16"].tolist(), 8 if dry else 64
    wanted = data["greedy_ref_tokens_16"].tolist()[:length]
    bad, states = [], {}
    for depth in range(5):
        for eager in (True,) if dry else (True, False):
            tokens, state, mode = decode(model, prompt, depth, length, eager)
            case = f"{name} depth {depth} {mode}"
            states[case] = state
            same = tokens == wanted
            print(f"{case}: {'the golden tokens' if same else f'{tokens} for {wanted}'}")
            if not same:
                bad.append(case)
    first = next(iter(states.values()))
    bad += [f"{case}: other cache bits" for case, state in states.items() if state != first]
    return bad


def decode(
    model: Model, prompt: list[int], depth: int, length: int, eager: bool
) -> tuple[list[int], dict[str, str], str]:
    """`length` greedy tokens after the prompt, the state afterwards, and the mode."""
    device = getattr(model.kernels, "device", None)
    cache = KVCache(model.config, context=len(prompt) + length + 1, draft_max=4, device=device)
    streams = model.forward(prompt, cache)
    assert model.mtp is not None
    model.mtp.follow(prompt, 0, None, streams, cache)
    cache.commit(len(prompt))
    graph = DecodeGraph(model, cache, eager=eager)
    graph.start(int(argmax(model.logits(streams[-1:]))[0]), streams[-1])
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += graph.cycle(min(depth, length - len(tokens) - 1)).tokens
    return tokens, cache.state_hash(), graph.mode


# --- speed ---------------------------------------------------------------------------------------


def rehearsal(options: argparse.Namespace, layers: int | None) -> Model:
    """A model of Flash's dimensions with random weights, made on the device."""
    config = FLASH if layers is None else shortened(FLASH, layers)
    profile = find_profile("official")
    if options.dry:
        config = replace(
            shortened(config, 4), dim=256, vocab=320, heads=4, head_dim=128, q_rank=64, groups=2,
            o_rank=32, experts=8, experts_used=2, expert_dim=256, index_heads=4, top_k=16,
        )  # fmt: skip
        kernels: Kernels = ReferenceKernels(config, profile)
        device = torch.device("cpu")
    else:
        from ds4flow.kernels.gpu.backend import GpuKernels

        kernels = GpuKernels(config, profile)
        device = kernels.device
    synth = Synthesis(config, options.mix, device, adopt=getattr(kernels, "adopt", None))
    return Model(config, synth.trunk(), synth.mtp(), profile, kernels)


def bytes_per_token(config: ModelConfig, trunk: TrunkWeights) -> int:
    """Weight bytes that one decoded token reads: the used experts, the indexer's queries too."""
    total = trunk.output.nbytes + trunk.head.hc.fn.nbytes
    for layer in trunk.layers:
        moe = layer.moe
        dense = [layer.hc_attn.fn, layer.hc_ffn.fn, layer.q_a, layer.q_b, layer.kv, layer.out_a]
        dense += [layer.out_b, moe.router, moe.shared_gate, moe.shared_up, moe.shared_down]
        for compressor in (layer.compressor, layer.indexer and layer.indexer.compressor):
            if compressor:
                dense += [compressor.kv, compressor.gate]
        if layer.indexer:
            dense += [layer.indexer.q_b, layer.indexer.proj]
        total += sum(weight.nbytes for weight in dense)
        stacks = moe.gate.nbytes + moe.up.nbytes + moe.down.nbytes
        total += stacks * config.experts_used // config.experts
    return total


def speed(options: argparse.Namespace) -> None:
    """Milliseconds per cycle of each verify width, tokens/s, and the share of the bandwidth."""
    model = rehearsal(options, options.layers)
    config = model.config
    read = bytes_per_token(config, model.weights)
    copy = None if options.dry else copy_bandwidth()
    results = []
    for context in (64,) if options.dry else options.contexts:
        cost = {}
        for width in range(5):
            cost[width] = cycle_seconds(model, context, width, options)
            print(f"context {context}, {width} drafts: {1000 * cost[width]:.3f} ms", flush=True)
        plain = 1 / cost[0]
        gain = (1 + ACCEPTANCE + ACCEPTANCE**2) / cost[2]
        share = None if copy is None else read * plain / copy
        print(f"context {context}: {plain:.1f} tokens/s greedy, {read * plain / 1e12:.2f} TB/s")
        print(f"  draft 2 at acceptance {ACCEPTANCE}: {gain:.1f} tokens/s ({gain / plain:.2f}x)")
        results.append(
            {"context": context, "milliseconds": {w: 1000 * t for w, t in cost.items()},
             "tokens_per_second": plain, "draft_2": gain, "bandwidth_share": share}
        )  # fmt: skip
    print(json.dumps({"mix": options.mix, "layers": config.layers, "results": results}))


def cycle_seconds(model: Model, context: int, width: int, options: argparse.Namespace) -> float:
    """Mean time of one cycle at a context whose rows are zeros; values do not change the work."""
    device = getattr(model.kernels, "device", None)
    room = context + (WARM + TIMED + 4) * (width + 1)
    cache = KVCache(model.config, context=room, draft_max=4, chunk=8, device=device)
    cache.length = context
    graph = DecodeGraph(model, cache, eager=options.eager)
    hidden = torch.randn(model.config.streams, model.config.dim, device=device)
    graph.start(1, hidden)
    graph.capture(range(width, width + 1))
    rounds = 2 if options.dry else TIMED
    for _ in range(1 if options.dry else WARM):
        graph.cycle(width)
    return seconds(lambda: [graph.cycle(width) for _ in range(rounds)]) / rounds


def profile(options: argparse.Namespace) -> None:
    """Time per kernel of an eager cycle over the first layers."""
    model = rehearsal(options, options.layers or 6)
    device = getattr(model.kernels, "device", None)
    cache = KVCache(model.config, context=4200, draft_max=4, chunk=8, device=device)
    cache.length = 4096
    graph = DecodeGraph(model, cache, eager=True)
    hidden = torch.randn(model.config.streams, model.config.dim, device=device)
    graph.start(1, hidden)
    graph.cycle(2)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as record:
        graph.cycle(0)
        graph.cycle(2)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(record.key_averages().table(sort_by=key, row_limit=40))


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = {"machine": machine, "parity": parity, "speed": speed, "profile": profile}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--eager", action="store_true", help="do not capture")
    parser.add_argument("--mix", choices=("q2", "q4"), default="q2")
    parser.add_argument("--layers", type=int, default=None, help="only the first layers of Flash")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768])
    options = parser.parse_args()
    steps[options.step](options)


if __name__ == "__main__":
    main()
