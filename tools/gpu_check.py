"""Steps of tools/gpu_check.sh that are no single command of ds4flow.

`--dry` runs the same steps small and uncaptured on torch operations, to test this file without a
GPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ds4flow import chat
from ds4flow.bench.graph import copy_bandwidth
from ds4flow.cache import KVCache
from ds4flow.config import compose
from ds4flow.device import DeviceChoice
from ds4flow.gguf import GgufFile
from ds4flow.graph import DecodeGraph
from ds4flow.model.trunk import Model
from ds4flow.overrides import quoted
from ds4flow.prompt_run import perform
from ds4flow.recorded import recorded
from ds4flow.rundir import RunDir
from ds4flow.runs.record import Run
from ds4flow.speculate import argmax
from ds4flow.synth.presets import SYNTH_FLASH, changed
from ds4flow.synth.unwritten import Unwritten, made_model
from ds4flow.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "golden"
NAMES = ("tiny-f32", "tiny-iq2", "tiny-q4k")
PROMPT = "def read_lines(path):\n"
SMALL = {
    **{"layers": "4", "dim": "256", "vocab": "640", "heads": "4", "head_dim": "128"},
    **{"q_rank": "64", "groups": "2", "o_rank": "32", "experts": "8", "experts_used": "2"},
    **{"expert_dim": "256", "index_heads": "4", "top_k": "16"},
}


def where(dry: bool) -> DeviceChoice:
    """The GPU and its kernels, or torch operations of fixed shapes."""
    if dry:
        return DeviceChoice("cpu", "static", "dry")
    return DeviceChoice("cuda", "gpu", "the check is for a GPU")


def machine(_: argparse.Namespace) -> None:
    """Versions, device and the bandwidth of a plain copy."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    if torch.cuda.is_available():
        import triton

        free, total = torch.cuda.mem_get_info()
        print(f"triton {triton.__version__}, {torch.cuda.get_device_name(0)}")
        print(f"memory: {free / 2**30:.1f} GiB free of {total / 2**30:.1f}")
        print(f"copy: {(copy_bandwidth(torch.device('cuda')) or 0) / 1e12:.2f} TB/s")


# --- parity --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model, a prompt, and the greedy tokens after it where they are known."""

    name: str
    main: Path
    mtp: Path
    prompt: list[int]
    wanted: list[int] | None


def cases(folder: Path, dry: bool) -> Iterator[Case]:
    """The golden models, unpacked to `folder`, and the demo model."""
    for name in NAMES[:1] if dry else NAMES:
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
            archive.extractall(folder, **safe)
        data = np.load(GOLDEN / f"{name}.npz")
        main, mtp = folder / f"{name}.gguf", folder / f"{name}.mtp-support.gguf"
        prompt, wanted = data["tokens_16"].tolist(), data["greedy_ref_tokens_16"].tolist()
        yield Case(name, main, mtp, prompt, wanted)
    demo = Path(str(resources.files("ds4flow.demo")))
    main, mtp = demo / "ds4flow-demo.gguf", demo / "ds4flow-demo-mtp.gguf"
    tokenizer = Tokenizer.from_metadata(GgufFile.open(main).metadata)
    yield Case("demo", main, mtp, chat.prompt_ids(tokenizer, PROMPT, chat="raw"), None)


def parity(options: argparse.Namespace) -> None:
    """Greedy tokens at depths 0..4, captured and eager, against the golden ones where there are.

    Between depths and between graph and eager tokens and visible cache must have equal bits, and
    on the demo model some drafts must be accepted and some rejected.
    """
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), options.dry):
            bad += parity_of(case, options.dry)
    if bad:
        sys.exit(f"{len(bad)} differences: {bad[:5]}")


def parity_of(case: Case, dry: bool) -> list[str]:
    """Differences of one model."""
    choice = where(dry)
    model = Model.load(
        GgufFile.open(case.main),
        GgufFile.open(case.mtp),
        profile="plain",
        kernels=choice.kernels,
        device=torch.device(choice.name),
    )
    length = 8 if dry else 64
    wanted = None if case.wanted is None else case.wanted[:length]
    bad, states, accepted, drafted = [], {}, 0, 0
    for depth in range(5):
        for eager in (True,) if dry else (True, False):
            ran = decode(model, case.prompt, depth, length, eager)
            label = f"{case.name} depth {depth} {ran.mode}"
            wanted = wanted or ran.tokens
            states[label] = ran.state
            accepted, drafted = accepted + ran.accepted, drafted + ran.drafted
            known = "the golden tokens" if case.wanted else "the same tokens"
            same = ran.tokens == wanted
            print(f"{label}: {known if same else f'{ran.tokens} for {wanted}'}")
            if not same:
                bad.append(label)
    first = next(iter(states.values()))
    bad += [f"{label}: other cache bits" for label, state in states.items() if state != first]
    print(f"{case.name}: {accepted} of {drafted} drafts accepted")
    if case.name == "demo" and not dry and not 0 < accepted < drafted:
        bad.append("demo: no draft was accepted, or none rejected")
    return bad


class Ran(NamedTuple):
    """What a decoding left: tokens, digests of the cache, mode, and what became of the drafts."""

    tokens: list[int]
    state: dict[str, str]
    mode: str
    accepted: int
    drafted: int


def decode(model: Model, prompt: list[int], depth: int, length: int, eager: bool) -> Ran:
    """`length` greedy tokens after the prompt."""
    context = len(prompt) + length + 1
    cache = KVCache(model.config, context=context, draft_max=4, device=model.device)
    streams = model.forward(prompt, cache)
    assert model.mtp is not None
    model.mtp.follow(prompt, 0, None, streams, cache)
    cache.commit(len(prompt))
    graph = DecodeGraph(model, cache, eager=eager)
    graph.start(int(argmax(model.logits(streams[-1:]))[0]), streams[-1])
    tokens: list[int] = []
    accepted = drafted = 0
    while len(tokens) < length:
        cycle = graph.cycle(min(depth, length - len(tokens) - 1))
        tokens += cycle.tokens
        accepted, drafted = accepted + cycle.accepted, drafted + len(cycle.drafts)
    return Ran(tokens, cache.state_hash(), graph.mode, accepted, drafted)


# --- a set of prompts -----------------------------------------------------------------------------


def prompts(options: argparse.Namespace) -> None:
    """Three prompts in one load as `ds4flow run` does them: by the best cycle, which is captured
    once for all of them, and gives the text that each prompt has alone."""
    texts = ("def read_lines(path):\n", "import os\n", "class Reader:\n    def __init__(self")
    words = ["mtp.draft=2", "log=quiet", f"commit.max_tokens={8 if options.dry else 64}"]
    words += ["runtime=cpu", "pipeline=graph"] if options.dry else []
    with tempfile.TemporaryDirectory() as folder:
        lines = [{"id": str(i), "category": "c", "prompt": text} for i, text in enumerate(texts)]
        path = Path(folder) / "set.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        whole = ran(Path(folder) / "set", [*words, f"prompts={path}"])
        alone = [
            ran(Path(folder) / str(i), [*words, f"prompt={quoted(text)}"])
            for i, text in enumerate(texts)
        ]
        parts = [Run.open(part) for part in sorted(whole.path.glob("prompt-*"))]
        for part, one in zip(parts, alone, strict=True):
            graphs = part.facts["graphs"]
            print(f"{part.facts['decode']} built {graphs['built']} kept {graphs['kept']}")
            if part.tokens != one.tokens:
                sys.exit(f"other tokens than alone: {part.tokens} for {one.tokens}")
            if part.facts["decode"]["mode"] != ("eager" if options.dry else "graph"):
                sys.exit("this is not the best cycle here")
        if any(part.facts["graphs"]["built"] for part in parts[1:]):
            sys.exit("a graph was captured again")


def ran(path: Path, words: list[str]) -> Run:
    """A run in the folder `path`."""
    directory = RunDir.create(path)
    with recorded(directory):
        perform(compose(words), directory)
    return Run.open(path)


# --- profile -------------------------------------------------------------------------------------


def profile(options: argparse.Namespace) -> None:
    """Time per kernel of eager cycles, without drafts and with two, of Flash's first layers."""
    recipe = changed(SYNTH_FLASH, SMALL if options.dry else {"layers": str(options.layers)})
    made = Unwritten(recipe, seed=0)
    model = made_model(made, where(options.dry), "official", fix="use fewer --layers")
    cache = KVCache(model.config, context=4200, draft_max=4, chunk=8, device=model.device)
    cache.length = 4096
    graph = DecodeGraph(model, cache, eager=True)
    graph.start(1, torch.randn(model.config.streams, model.config.dim, device=model.device))
    for width in (0, 2):  # compiled before they are timed
        graph.cycle(width)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as record:
        graph.cycle(0)
        graph.cycle(2)
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(record.key_averages().table(sort_by=key, row_limit=40))


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = {"machine": machine, "parity": parity, "prompts": prompts, "profile": profile}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--layers", type=int, default=6, help="the first layers of Flash")
    options = parser.parse_args()
    steps[options.step](options)


if __name__ == "__main__":
    main()
