"""Synthetic models: the loader takes them, their numbers are sane, files appear whole or not."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ModelConfig
from ds4flow.model.mtp_weights import load_mtp
from ds4flow.model.trunk import Model
from ds4flow.model.weights import load_trunk
from ds4flow.quants import dequantize
from ds4flow.speculate import argmax
from ds4flow.synth import FLASH, PRESETS, Recipe, recipe, synthesize
from ds4flow.synth.blocks import TYPES, random_table, random_tensor, unit_diagonal
from ds4flow.synth.command import synth_command
from ds4flow.synth.weights import mtp_plan, trunk_plan
from ds4flow.tokenizer import ASSISTANT, Tokenizer
from ds4flow.traffic import distinct_experts, selects, weight_traffic

# Bytes that one token of DeepSeek-V4-Flash (two-bit experts) reads, by group.
FLASH_BYTES = {
    "attn_q_b": 1_533_018_112,
    "attn_output_a": 1_533_018_112,
    "attn_output_b": 1_533_018_112,
    "shared expert": 1_149_763_584,
    "output": 562_626_560,
    "attention compressors": 520_241_152,
    "indexer query": 363_331_584,
    "attn_q_a": 191_627_264,
    "attn_kv": 95_813_632,
    "router": 90_177_536,
    "indexer compressors": 88_101_888,
    "hyper-connections": 67_642_440,
    "routed gate and up": 1_115_947_008,
    "routed down": 710_148_096,
}
FLASH_RECIPE = Recipe("flash", FLASH, PRESETS["flash-slice"].types)


def as_stored(config: ModelConfig) -> ModelConfig:
    """The configuration after its epsilons have been float32."""
    eps, eps_hc = (float(np.float32(value)) for value in (config.eps, config.eps_hc))
    return replace(config, eps=eps, eps_hc=eps_hc)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("synth")
    main, mtp = folder / "tiny.gguf", folder / "tiny.mtp-support.gguf"
    synthesize("tiny", main, mtp_path=mtp, seed=3)
    return main, mtp


# --- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1.0, 5e-4])
@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_have_the_wanted_moments(type_name: str, std: float) -> None:
    shape = (256, 1024)
    data = torch.from_numpy(random_tensor(np.random.default_rng(5), type_name, shape, std))
    if type_name == "BF16":
        data = data.view(torch.bfloat16)
    weights = dequantize(data, type_name, shape)
    assert bool(torch.isfinite(weights).all())
    assert float(weights.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(weights.mean())) < 0.02 * std
    # rows and columns are independent enough for sums to grow like the root of their length
    for axis in (0, 1):
        sums = weights.sum(axis)
        assert float(sums.std()) == pytest.approx(std * shape[axis] ** 0.5, rel=0.25)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="multiples of 256"):
        random_tensor(np.random.default_rng(0), "Q4_K", (4, 128), 1.0)


def test_table_rows_are_distinct_and_use_every_expert() -> None:
    table = random_table(np.random.default_rng(1), 4000, 3, 7)
    ordered = np.sort(table, axis=1)
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    for place in range(3):
        counts = np.bincount(table[:, place], minlength=7)
        assert counts.min() > 0.8 * 4000 / 7
        assert counts.max() < 1.2 * 4000 / 7


def test_unit_diagonal_is_the_identity_up_to_the_noise() -> None:
    data = random_tensor(np.random.default_rng(2), "Q8_0", (64, 64), 0.001)
    unit_diagonal(data)
    weights = dequantize(torch.from_numpy(data), "Q8_0", (64, 64))
    assert torch.allclose(weights.diagonal(), torch.ones(64), atol=1e-3)
    assert float((weights - torch.diag(weights.diagonal())).abs().max()) < 0.003


# --- whole models --------------------------------------------------------------------------------


def test_tiny_loads_and_generates(tiny: tuple[Path, Path]) -> None:
    main, support = map(GgufFile.open, tiny)
    config = ModelConfig.from_gguf(main)
    assert config == as_stored(PRESETS["tiny"].config)
    load_trunk(main, config)
    load_mtp(support, config, main)
    model = Model.load(main, support)
    cache = KVCache(config, context=64, draft_max=0)
    prompt = list(range(20, 40))
    streams = model.forward(prompt, cache)
    assert model.mtp is not None
    model.mtp.follow(prompt, 0, None, streams, cache)
    cache.commit(len(prompt))
    logits = model.logits(streams)
    assert float(logits.std()) == pytest.approx(3.0, rel=0.1)
    assert 0.5 < float(streams.pow(2).mean().sqrt()) < 2.0
    hidden, token = streams[-1], int(argmax(logits[-1]))
    hits = 0
    for _ in range(40):
        guess, _ = model.mtp.step(hidden, token, cache.length, cache)
        streams = model.forward([token], cache)
        model.mtp.follow([token], cache.length, hidden, streams, cache)
        cache.commit(1)
        hidden, token = streams[0], int(argmax(model.logits(streams))[0])
        hits += int(argmax(guess)) == token
    # the block is built to agree often, and never always
    assert 5 < hits < 40


def test_prompts_can_be_written(tiny: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.from_metadata(GgufFile.open(tiny[0]).metadata)
    text = "any text: Ünïcödé, 漢字 \U0001f600\n\t 12345"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == PRESETS["tiny"].config.vocab
    assert (tokenizer.bos, tokenizer.eos) == (0, 1)
    assert ASSISTANT in tokenizer.specials


@pytest.mark.parametrize("preset", ["medium", "flash-slice", "flash-shares"])
def test_a_cut_down_preset_of_every_kind_loads(preset: str, tmp_path: Path) -> None:
    changes = {"dim": "256", "expert_dim": "256", "vocab": "300", "layers": "4", "q_rank": "32"}
    changes |= {"o_rank": "32", "experts": "8", "hash_layers": "2"}
    main, mtp = tmp_path / "a.gguf", tmp_path / "b.gguf"
    report = synthesize(preset, main, mtp_path=mtp, changes=changes)
    file, support = GgufFile.open(main), GgufFile.open(mtp)
    assert ModelConfig.from_gguf(file) == as_stored(report.config)
    assert report.config.layers == 4
    assert (file.size, support.size) == (report.nbytes, report.mtp_nbytes)
    model = Model.load(file, support)
    cache = KVCache(report.config, context=8, draft_max=0)
    assert bool(torch.isfinite(model.logits(model.forward([300 - 1, 5, 7], cache))).all())
    table = file.array("blk.0.ffn_gate_tid2eid.weight")
    assert table.shape == (300, report.config.experts_used)


def test_every_weight_type_can_be_chosen(tmp_path: Path) -> None:
    types = {"embed": "bf16", "output": "Q4_K", "side": "BF16", "gate_up": "Q4_K", "down": "F16"}
    report = synthesize("tiny", tmp_path / "a.gguf", changes=types)
    file = GgufFile.open(report.path)
    assert file.tensors["token_embd.weight"].type == "BF16"
    assert file.tensors["output.weight"].type == "Q4_K"
    assert file.tensors["blk.2.ffn_down_exps.weight"].type == "F16"
    load_trunk(file, report.config)
    assert report.mtp_path is None


def test_the_same_seed_gives_the_same_bytes(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    synthesize("tiny", again, mtp_path=tmp_path / "again.mtp.gguf", seed=3)
    synthesize("tiny", other, seed=4)
    assert again.read_bytes() == tiny[0].read_bytes()
    assert (tmp_path / "again.mtp.gguf").read_bytes() == tiny[1].read_bytes()
    names = GgufFile.open(other).tensors
    changed = [
        name
        for name in names
        if not np.array_equal(GgufFile.open(other).array(name), GgufFile.open(again).array(name))
    ]
    assert changed == list(names)


# --- shares --------------------------------------------------------------------------------------


def test_flash_traffic_is_the_published_accounting() -> None:
    tensors = [plan.info for plan in trunk_plan(FLASH_RECIPE)]
    step = weight_traffic(tensors, FLASH)
    assert {group: step.groups[group] for group in FLASH_BYTES} == FLASH_BYTES
    assert step.total == 9_556_356_004
    assert sum(info.nbytes for info in tensors) == 86_714_775_900
    without = weight_traffic(tensors, FLASH, indexer=False)
    assert step.total - without.total == FLASH_BYTES["indexer query"]
    ratios = [weight_traffic(tensors, FLASH, rows=m).total / step.total for m in (2, 3, 4)]
    assert ratios == pytest.approx([1.19, 1.37, 1.55], abs=0.005)
    block = [plan.info for plan in mtp_plan(FLASH_RECIPE)]
    assert weight_traffic(block, FLASH).total == 268_656_108
    assert sum(info.nbytes for info in block) == 3_807_600_108


def test_flash_shares_has_the_shares_of_flash() -> None:
    made = PRESETS["flash-shares"]
    tensors = [plan.info for plan in trunk_plan(made)]
    assert sum(info.nbytes for info in tensors) == pytest.approx(300e6, rel=0.1)
    step = weight_traffic(tensors, made.config)
    assert step.total > 100e6
    shares, total = step.shares(), sum(FLASH_BYTES.values())
    for group, nbytes in FLASH_BYTES.items():
        wanted = nbytes / total
        assert abs(shares[group] - wanted) < 0.025, group
        if wanted > 0.03:
            assert shares[group] == pytest.approx(wanted, rel=0.1), group
    for rows, wanted in ((2, 1.19), (3, 1.37), (4, 1.55)):
        ratio = weight_traffic(tensors, made.config, rows=rows).total / step.total
        assert ratio == pytest.approx(wanted, rel=0.08)


def test_distinct_experts() -> None:
    assert distinct_experts(256, 6, 1) == pytest.approx(6)
    assert distinct_experts(256, 6, 4) == pytest.approx(23.17, abs=0.01)
    assert distinct_experts(8, 8, 3) == 8


def test_selection_starts_when_more_rows_are_visible_than_kept() -> None:
    assert not selects(FLASH, 2050)
    assert selects(FLASH, 2051)


def test_medium_has_its_published_size() -> None:
    tensors = [plan.info for plan in trunk_plan(PRESETS["medium"])]
    assert sum(info.nbytes for info in tensors) == pytest.approx(317_039_840, rel=0.01)


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": "7"}, "not a multiple"),
        ({"vocab": "100"}, "no room"),
        ({"experts_used": "99"}, "experts_used=99"),
        ({"hash_layers": "99"}, "hash_layers=99"),
        ({"ratios": "0,3,4", "layers": "3"}, "known ratios"),
        ({"ratios": "0,4", "layers": "5"}, "2 entries"),
        ({"index_dim": "96"}, "power of two"),
        ({"rope_dim": "63"}, "even"),
        ({"layers": "0"}, "at least 1"),
        ({"dim": "many"}, "not an integer"),
        ({"eps": "nan"}, "out of range"),
        ({"down": "Q5_K"}, "not a weight type"),
        ({"wdith": "3"}, "not a key"),
        ({"expert_norm": "2"}, "true or false"),
    ],
)
def test_impossible_recipes_name_the_key(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        recipe("tiny", changes)


def test_changing_layers_continues_the_ratios() -> None:
    assert recipe("tiny", {"layers": "7"}).config.ratios == (0, 0, 4, 128, 4, 128, 4, 0)
    assert recipe("tiny", {"layers": "2"}).config.ratios == (0, 0, 0)
    assert recipe("tiny", {"ratios": "4,128,0"}).config.ratios == (4, 128, 0, 0)
    assert recipe("tiny", {"clamp": "7"}).config.clamp == (7.0,) * 6


def test_widths_that_do_not_fit_the_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not whole Q2_K blocks"):
        synthesize("tiny", tmp_path / "a.gguf", changes={"expert_dim": "128"})
    assert not list(tmp_path.iterdir())


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["main", "mtp"])
def test_an_existing_file_is_never_overwritten(which: str, tmp_path: Path) -> None:
    paths = {"main": tmp_path / "a.gguf", "mtp": tmp_path / "b.gguf"}
    paths[which].write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists"):
        synthesize("tiny", paths["main"], mtp_path=paths["mtp"])
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"precious"]


def test_one_name_for_both_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both files"):
        synthesize("tiny", tmp_path / "a.gguf", mtp_path=tmp_path / "a.gguf")


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """A real failure to write: the system refuses to let a file grow beyond `nbytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with file_size_limit(2 << 20), pytest.raises(Ds4FlowError, match=r"cannot write.*a\.gguf"):
        synthesize("tiny", tmp_path / "a.gguf", mtp_path=tmp_path / "b.gguf")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(_name: str, done: int, _total: int) -> None:
        if done > 1 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize("tiny", tmp_path / "a.gguf", mtp_path=tmp_path / "b.gguf", progress=stop)
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_found_before_writing(tmp_path: Path) -> None:
    with pytest.raises(Ds4FlowError, match="MB free"):
        synthesize("tiny", tmp_path / "a.gguf", changes={"experts": "1000000000"})
    assert not list(tmp_path.iterdir())


# --- the command ---------------------------------------------------------------------------------


def test_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["preset=tiny", "seed=3", "layers=3"]
    assert synth_command(str(tmp_path / "a.gguf"), words) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a.gguf", "a.mtp-support.gguf"}
    shown = capsys.readouterr().out
    assert "attn_q_b" in shown
    assert "a.mtp-support.gguf" in shown
    assert synth_command(str(tmp_path / "c.gguf"), ["preset=tiny", "mtp=false"]) == 0
    assert not (tmp_path / "c.mtp-support.gguf").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["tiny"],
        ["preset=tinny"],
        ["seed=-1"],
        ["seed=1", "seed=2"],
        ["layer=3"],
        ["mtp=perhaps"],
        ["mtp=false", "mtp_path=x.gguf"],
    ],
)
def test_command_refuses_wrong_words(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        synth_command(str(tmp_path / "a.gguf"), words)
    assert not list(tmp_path.iterdir())
