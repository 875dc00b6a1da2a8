"""The peer's protocol, with a worker that stands in for the other engine."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from ds4flow.bench.decoding import measure_peer
from ds4flow.bench.engine import Engine, greedy, prepare
from ds4flow.bench.peer import Peer, check_peer
from ds4flow.bench.settings import Settings, random_tokens
from ds4flow.errors import Ds4FlowError, UsageError

QUICK = Settings(repeats=2, warmup=0, tokens=5, chunk=8)
INSTALLED = importlib.util.find_spec("llama_cpp") is not None

# A module that stands in for llama-cpp-python: the same calls, an engine that counts upwards.
FAKE = """
import ctypes, os, types
__version__ = "0.0-fake"
VOCABULARY = 300


def llama_model_default_params():
    return types.SimpleNamespace(use_extra_bufts=True)


class Llama:
    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, n_gpu_layers, verbose):
        if "broken" in model_path:
            raise ValueError("unknown architecture")
        if "amx" in model_path and llama_model_default_params().use_extra_bufts:
            os.abort()
        assert (n_threads, n_threads_batch, n_gpu_layers, verbose) == (1, 1, 0, False)
        self.ctx, self.limit, self.last, self.seen = self, n_ctx, 0, 0

    def reset(self):
        self.seen = 0

    def n_vocab(self):
        return VOCABULARY

    def eval(self, tokens):
        self.last = tokens[-1]
        self.seen += len(tokens)
        print("noise on stdout")
        if self.seen > self.limit:
            raise SystemExit(3)


def llama_get_logits_ith(ctx, row):
    values = (ctypes.c_float * VOCABULARY)()
    values[(ctx.last + 1) % VOCABULARY] = 1.0
    return ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
"""


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("fake_engine")
def test_the_worker_prefills_and_counts(tmp_path: Path) -> None:
    with Peer("llama.cpp", tmp_path / "a.gguf", threads=1, context=20) as peer:
        assert (peer.version, peer.note) == ("0.0-fake", "")
        for _ in range(2):
            run = peer.run([1, 2, 7], 4)
            assert run.tokens == (8, 9, 10, 11)
            assert min(run.prefill, run.decode, run.rate) > 0
        with pytest.raises(Ds4FlowError, match=r"stopped at run \(exit code 3\)"):
            peer.run([1] * 30, 1)


@pytest.mark.usefixtures("fake_engine")
def test_a_file_that_the_peer_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(Ds4FlowError, match="unknown architecture"):
        Peer("llama.cpp", tmp_path / "broken.gguf", threads=1, context=20)


@pytest.mark.usefixtures("fake_engine")
def test_a_peer_that_stops_with_repacked_weights_runs_without(tmp_path: Path) -> None:
    with Peer("llama.cpp", tmp_path / "amx.gguf", threads=1, context=20) as peer:
        assert "without repacked weights" in peer.note
        assert peer.run([4], 1).tokens == (5,)


@pytest.mark.usefixtures("fake_engine")
def test_both_engines_in_turn(engine: Engine) -> None:
    prompt = random_tokens(engine, 9, 0)
    found = measure_peer(engine, "llama.cpp", prompt, QUICK)
    assert (found.peer, found.version, found.prompt, found.tokens) == (
        *("llama.cpp", "0.0-fake"),
        *(9, 5),
    )
    assert len(found.ratio.values) == 2
    for ours, theirs, ratio in (
        (found.ours, found.theirs, found.ratio),
        (found.prefill_ours, found.prefill_theirs, found.prefill_ratio),
    ):
        expected = [a / b for a, b in zip(ours.values, theirs.values, strict=True)]
        assert list(ratio.values) == pytest.approx(expected)
    assert 0 <= found.same_prefix < 5
    json.dumps(found.same_prefix)


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed"):
        check_peer("llama.cpp")
    with pytest.raises(UsageError, match="not a known engine"):
        check_peer("llama-cpp")


@pytest.mark.skipif(not INSTALLED, reason="llama-cpp-python is not installed")
def test_the_real_engine_agrees(golden_dir: Path) -> None:
    from ds4flow.gguf import GgufFile

    main = GgufFile.open(golden_dir / "tiny-q4k.gguf")
    engine = Engine.load(main, profile="plain")
    prompt = random_tokens(engine, 24, 0)
    found = measure_peer(engine, "llama.cpp", prompt, QUICK)
    start = prepare(engine.model, prompt, room=5)
    assert len(greedy(engine.model, start, 5).tokens) == 5
    # it rounds activations, so late tokens may differ; early ones of this model do not
    assert found.same_prefix >= 3
    assert sys.modules.get("llama_cpp") is None
