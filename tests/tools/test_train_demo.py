"""The demo model's maker: quantiser error, tokenizer round trip, bit-exact resumption."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo import data, export, model, quantize, train
from demo.model import DemoConfig, Mode

MICRO = DemoConfig(vocab=300, top_k=8)


def _dequantised(weights: np.ndarray) -> np.ndarray:
    encoded = quantize.quantize_q4_k(weights)
    return gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType.Q4_K)


def test_q4_k_error_is_near_the_best_of_15_steps() -> None:
    rng = np.random.default_rng(0)
    weights = (0.05 * rng.standard_normal((4, 64, 256))).astype(np.float32)
    back = _dequantised(weights)
    assert back.shape == weights.shape
    relative = np.sqrt(((back - weights) ** 2).mean() / (weights**2).mean())
    # Plain minimum/maximum scaling gives 0.080 on a normal distribution.
    assert relative < 0.073
    # No weight is off by more than the step of its own block allows.
    span = np.ptp(weights.reshape(-1, 32), axis=1)
    worst = np.abs(back - weights).reshape(-1, 32).max(1)
    assert (worst < 0.11 * span).all()


def test_q4_k_keeps_what_its_grid_holds() -> None:
    # Codes 0..15 with offset 7 in every block: representable up to the half-precision factors.
    codes = np.tile(np.arange(16, dtype=np.float32), 16)
    weights = (0.25 * (codes - 7))[None]
    assert np.abs(_dequantised(weights) - weights).max() < 2e-3
    assert np.abs(_dequantised(np.zeros((2, 256), np.float32))).max() == 0


def test_q4_k_refuses_rows_that_do_not_fill_blocks() -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        quantize.quantize_q4_k(np.zeros((1, 128), np.float32))


def test_shipped_weights_equal_what_a_reader_gets(tmp_path: Path) -> None:
    params = model.init_trunk(MICRO, 3, torch.ones(MICRO.vocab))
    mtp = model.init_mtp(MICRO, params, 3)
    export.write_mtp(tmp_path / "mtp.gguf", MICRO, mtp)
    read = export.read_params(tmp_path / "mtp.gguf")
    assert len(read) == 32
    for name, tensor in quantize.shipped(mtp).items():
        assert torch.equal(read[name], tensor), name
    groups = export.bytes_per_token(tmp_path / "mtp.gguf", MICRO)
    stored = 3 * MICRO.experts_used * MICRO.ffn * MICRO.embedding
    assert groups["routed experts"] == stored * 144 // 256


def _corpus_documents() -> list[data.Document]:
    text = "import os\n\n\ndef read(path):\n    return open(path).read()\n\n\nclass A:\n    pass\n"
    docs = [data.Document(f"m{i}.py", text * 40 + f"# {i}\n", False, i == 0) for i in range(8)]
    return [*docs, data.Document("test/t.py", text * 80, True, False)]


def test_tokenizer_round_trip_and_special_ids() -> None:
    tok = data.train_tokenizer(_corpus_documents(), MICRO.vocab)
    vocab = tok.get_vocab()
    assert len(vocab) == MICRO.vocab
    assert [vocab[s] for s in (data.BOS, data.EOS, data.PAD)] == [0, 1, 2]
    assert [vocab[s] for s in data.TAIL_SPECIALS] == list(range(MICRO.vocab - 4, MICRO.vocab))
    for text in ("def f(x):\n\treturn {x}\n\n", "naïve 中文 1234567 \U0001f600", "  a\r\n   \n b "):
        ids = tok.encode(text, add_special_tokens=False).ids
        assert 0 not in ids
        assert tok.decode(ids) == text


def test_held_out_files_reach_neither_batches_nor_tokenizer() -> None:
    docs = _corpus_documents()
    tok = data.train_tokenizer(docs, MICRO.vocab)
    corpus = data.build_corpus(tok, docs, 1)
    assert [path for path, _ in corpus.held_out] == ["m0.py"]
    assert "m0.py" not in corpus.library.paths + corpus.tests.paths


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    params = model.init_trunk(MICRO, 5, torch.ones(MICRO.vocab))
    tokens = torch.randint(0, MICRO.vocab, (1, 256), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 200:] = 7
    with torch.no_grad():
        first = model.trunk_forward(MICRO, params, tokens, Mode())[1]
        second = model.trunk_forward(MICRO, params, other, Mode())[1]
    assert torch.equal(first[:200], second[:200])
    assert not torch.allclose(first[200:], second[200:])


@pytest.mark.parametrize("job", ["trunk", "mtp"])
def test_training_resumes_to_the_same_bits(job: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    docs = _corpus_documents()
    corpus = data.build_corpus(data.train_tokenizer(docs, MICRO.vocab), docs, 1)
    sched = train.Schedule(
        max_steps=2, tokens_per_step=128, length=128, long_from=2.0, quant_from=0.5, warmup=1
    )

    def run(name: str, stop_after: int = 0) -> tuple[model.Params, float]:
        params = model.init_trunk(MICRO, 9, corpus.counts(MICRO.vocab))
        if job == "mtp":
            params |= model.init_mtp(MICRO, params, 9)
        return train.train(
            job,
            MICRO,
            params,
            corpus,
            sched,
            tmp_path / name,
            lambda p: {},
            stop_after=stop_after,
            low=False,
        )

    try:
        whole, loss = run("whole.pt")
        run("parts.pt", stop_after=1)
        resumed, again = run("parts.pt")
    finally:
        torch.set_num_threads(threads)
    assert loss == again
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
