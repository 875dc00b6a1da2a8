"""Several processes that share heads and experts: the bits of one, and one run directory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ds4flow import env
from ds4flow.cache import KVCache
from ds4flow.cli import main
from ds4flow.device import choose
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.followers import silent
from ds4flow.gguf import GgufFile
from ds4flow.graph import DecodeGraph
from ds4flow.kernels import sharded
from ds4flow.model.config import ModelConfig
from ds4flow.model.shard import Shard
from ds4flow.model.trunk import Model
from ds4flow.speculate import argmax
from tests.command import ds4flow

DATA = Path(__file__).parent / "data" / "golden"
NAME = "tiny-iq2"


class Threads:
    """A group whose processes are threads of this one."""

    def __init__(self, rank: int, slots: list[torch.Tensor | None], meet: threading.Barrier):
        self.rank, self.world = rank, len(slots)
        self.slots, self.meet = slots, meet
        self.exchanges = 0

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.exchanges += 1
        self.slots[self.rank] = x.clone()
        self.meet.wait(60)
        everyone = [part.clone() for part in self.slots if part is not None]
        self.meet.wait(60)
        return everyone


def alone(file: GgufFile, kernels: str, prompt: list[int], steps: int) -> list[torch.Tensor]:
    return decode(Model.load(file, profile="plain", kernels=kernels), prompt, steps)


def decode(model: Model, prompt: list[int], steps: int) -> list[torch.Tensor]:
    """Logits of the prompt's last token and of `steps` greedy ones."""
    cache = KVCache(model.config, context=len(prompt) + steps + 1, draft_max=0)
    tokens, logits = prompt, []
    for _ in range(steps + 1):
        logits.append(model.logits(model.forward(tokens, cache)[-1:])[0])
        cache.commit(len(tokens))
        tokens = [int(argmax(logits[-1]))]
    return logits


@pytest.mark.parametrize("kernels", ["reference", "static"])
@pytest.mark.parametrize("world", [2])
def test_logits_have_the_bits_of_one_process(golden_dir: Path, kernels: str, world: int) -> None:
    file = GgufFile.open(golden_dir / f"{NAME}.gguf")
    prompt = np.load(DATA / f"{NAME}.npz")["tokens_16"].tolist()
    slots: list[torch.Tensor | None] = [None] * world
    meet = threading.Barrier(world)
    found: dict[int, list[torch.Tensor]] = {}
    groups = [Threads(rank, slots, meet) for rank in range(world)]

    def work(rank: int) -> None:
        try:
            model = Model.load(file, profile="plain", kernels=kernels, group=groups[rank])
            found[rank] = decode(model, prompt, 4)
        except BaseException:
            meet.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = alone(file, kernels, prompt, 4)
    layers = ModelConfig.from_gguf(file).layers
    for rank, group in enumerate(groups):
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted, strict=True))
        assert group.exchanges == 2 * layers * 5  # one for the heads, one for the experts


def test_each_process_keeps_its_part_only(golden_dir: Path) -> None:
    file = GgufFile.open(golden_dir / f"{NAME}.gguf")
    group = Threads(1, [None, None], threading.Barrier(1))
    whole = Model.load(file, profile="plain")
    part = Model.load(file, profile="plain", group=group)
    config = whole.config
    for ours, theirs in zip(part.weights.layers, whole.weights.layers, strict=True):
        for mine, all_of_it in (
            (ours.q_b, theirs.q_b),
            (ours.out_a, theirs.out_a),
            (ours.moe.gate, theirs.moe.gate),
            (ours.moe.up, theirs.moe.up),
            (ours.moe.down, theirs.moe.down),
        ):
            assert 2 * mine.nbytes == all_of_it.nbytes
            assert torch.equal(mine.float(), all_of_it.float()[mine.shape[0] :])
        assert torch.equal(ours.sinks, theirs.sinks[config.heads // 2 :])
    assert part.config == config


def test_counts_that_do_not_divide_are_refused(golden_dir: Path) -> None:
    config = ModelConfig.from_gguf(GgufFile.open(golden_dir / f"{NAME}.gguf"))
    with pytest.raises(UsageError, match=r"tensor_parallel=3 does not divide .* heads"):
        Shard(replace(config, heads=4, groups=2, experts=9), 0, 3)
    with pytest.raises(UsageError, match="9 experts"):
        Shard(replace(config, heads=4, groups=2, experts=9), 0, 2)


def test_a_library_whose_bits_follow_the_split_is_refused(
    golden_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fickle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T + weight.shape[0]

    monkeypatch.setattr(sharded.functional, "linear", fickle)
    group = Threads(0, [None, None], threading.Barrier(1))
    file = GgufFile.open(golden_dir / f"{NAME}.gguf")
    with pytest.raises(Ds4FlowError, match="change bits when split over 2 processes"):
        Model.load(file, profile="plain", group=group)


def test_the_graph_stays_eager_between_processes(golden_dir: Path) -> None:
    group = Threads(0, [None, None], threading.Barrier(1))
    file = GgufFile.open(golden_dir / f"{NAME}.gguf")
    model = Model.load(file, profile="plain", kernels="static", group=group)
    graph = DecodeGraph(model, KVCache(model.config, context=20, draft_max=0))
    assert (graph.mode, graph.why) == (
        "eager",
        "the exchange between processes is not captured",
    )


def test_kernels_of_the_cpu_cannot_be_shared() -> None:
    assert choose("cpu", "auto", processes=2).kernels == "reference"
    assert choose("cpu", "auto", graph=True, processes=2).kernels == "static"
    with pytest.raises(UsageError, match="cannot share a model between 2 processes"):
        choose("cpu", "cpu", processes=2)


RUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_torchruns_variables_are_read_when_all_are_there() -> None:
    assert env.ranks(RUN) == (1, 2)
    assert env.ranks(RUN | {"WORLD_SIZE": "1"}) is None
    assert env.ranks({"WORLD_SIZE": "8"}) is None
    assert [tuple(v) for v in env.read(RUN)] == [("WORLD_SIZE", "runtime.tensor_parallel", "2")]
    with pytest.raises(UsageError, match="RANK=x"):
        env.ranks(RUN | {"RANK": "x"})


def test_without_torchrun_the_command_to_type_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["run", "runtime.tensor_parallel=2"])
    assert result.exit_code == 2
    assert "needs 2 processes, and this is one alone" in result.stderr
    assert "torchrun --nproc-per-node 2 -m ds4flow run" in result.stderr


def test_a_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["run", "-m", "mtp.draft=0,1"])
    assert result.exit_code == 2
    assert "a sweep cannot run in the processes of torchrun" in result.stderr


def fail() -> None:
    print("error: no memory", file=sys.stderr)
    raise SystemExit(1)


def test_a_follower_is_silent_until_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with silent(3) as folder:
        print("text")
        print("note", file=sys.stderr)
    assert capsys.readouterr() == ("", "")
    assert not Path(folder).exists()
    with pytest.raises(SystemExit), silent(3):
        fail()
    assert capsys.readouterr() == ("", "process 3: error: no memory\n")


@pytest.mark.usefixtures("alone")
def test_two_processes_write_the_text_of_one(tmp_path: Path, golden_dir: Path) -> None:
    """Through the command line, with gloo between them: the graph's cycle, uncaptured, against
    one process that goes stage by stage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["run", "model=file", f"model.path={golden_dir / 'tiny-q4k.gguf'}"]
    words += [f"model.mtp_path={golden_dir / 'tiny-q4k.mtp-support.gguf'}", "model.profile=plain"]
    words += [
        "model.chat=raw",
        "-n",
        "5",
        "runtime.context=64",
        "mtp.full_logits=true",
        "-p",
        "abc",
    ]

    def start(rank: int) -> subprocess.Popen[str]:
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return subprocess.Popen(
            [sys.executable, "-m", "ds4flow", *words, "pipeline=graph"],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    processes = [start(0), start(1)]
    one = ds4flow(*words, "runtime.kernels=static", "mtp.draft=0", code=0)
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[1] == ("", "")
    assert "decoding: eager (the exchange between processes is not captured)" in said[0][1]
    assert "MTP is off: tensor parallelism, 2 processes share the model" in said[0][1]
    assert said[0][0] == one.stdout != ""
    runs = sorted(tmp_path.glob("runs/file/0*"))
    facts = {json.loads((run / "run.json").read_text())["tensor_parallel"]: run for run in runs}
    assert sorted(facts) == [1, 2]
    shared = json.loads((facts[2] / "run.json").read_text())
    assert shared["mtp_off"] == "tensor parallelism, 2 processes share the model"
    arrays = {
        world: [np.load(path)["verify"].tobytes() for path in sorted(run.glob("logits/*.npz"))]
        for world, run in facts.items()
    }
    assert len(arrays[1]) == 5
    assert arrays[1] == arrays[2]
