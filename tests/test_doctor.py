"""The doctor: verdicts with all reasons, bytes of the published model, exact conversion."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ds4flow.cache import KVCache
from ds4flow.doctor import convert_mtp, examine, inspect_command, print_report
from ds4flow.doctor.accounting import (
    F16,
    cache_read,
    cache_size,
    draft_bytes,
    traffic,
    weight_groups,
)
from ds4flow.doctor.report import FileReport, Report
from ds4flow.errors import Ds4FlowError, ModelFileError, UsageError
from ds4flow.gguf import GgufFile, TensorInfo
from ds4flow.model.config import ModelConfig
from ds4flow.model.mtp_weights import load_mtp
from ds4flow.model.slots import hyper_slots, layer_slots, trunk_slots
from tests.conftest import GOLDEN_NAMES
from tests.gguf_files import As, Raw, contents, encode, split, string, tensor, write

Change = Callable[[dict[str, object], dict[str, Raw]], None]


@pytest.fixture
def changed(golden_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a golden file again with changed metadata or tensors."""

    def make(name: str, change: Change, to: str = "changed.gguf") -> Path:
        keys, tensors = contents(golden_dir / name)
        change(keys, tensors)
        return write(tmp_path / to, keys, tensors)

    return make


def only(report: Report) -> FileReport:
    (file,) = report.files
    return file


def reasons(file: FileReport) -> str:
    return "\n".join(f"{problem.what} | {problem.fix}" for problem in file.problems)


def shown(report: Report) -> str:
    console = Console(file=StringIO(), width=120, force_terminal=True, color_system="standard")
    print_report(report, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# --- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_models_run_with_both_layouts(golden_dir: Path, name: str) -> None:
    main = golden_dir / f"{name}.gguf"
    support = golden_dir / f"{name}.mtp-support.gguf"
    sidecar = golden_dir / f"{name}.llama-mtp.gguf"
    report = examine([main, support, sidecar], context=4096, bandwidth_gbs=100.0)
    assert report.ok, [reasons(file) for file in report.files]
    assert [file.role for file in report.files] == ["main", "mtp", "mtp"]
    assert report.files[0].verdict == f"runs, drafts with {support}"
    layouts = [file.drafter.layout for file in report.files if file.drafter is not None]
    assert layouts == [None, "mtp.0", "nextn"]
    assert [file.fits[0].same_tokenizer for file in report.files[1:]] == [None, True]
    one, two = (file.fits[0].draft_bytes for file in report.files[1:])
    assert one == two
    file = GgufFile.open(main)
    census = report.files[0].census
    assert sum(count.tensors for count in census) == len(file.tensors)
    assert sum(count.bytes for count in census) == sum(i.nbytes for i in file.tensors.values())
    assert report.files[0].memory is not None
    assert report.files[0].memory.weights == sum(i.nbytes for i in file.tensors.values())
    assert report.files[0].dimensions == asdict(ModelConfig.from_gguf(file))
    assert json.loads(report.to_json())["files"][1]["fits"][0]["ok"] is True
    assert "tokens/s" in shown(report)


def test_main_file_alone_runs_without_drafts(golden_dir: Path) -> None:
    report = examine([golden_dir / "tiny-q4k.gguf"])
    assert report.ok
    assert only(report).verdict == "runs without drafts: no MTP block was given"
    assert only(report).traffic is not None
    assert only(report).traffic.draft is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["tiny-iq2.mtp-support.gguf", "tiny-iq2.llama-mtp.gguf"])
def test_mtp_file_alone_does_not_run(golden_dir: Path, name: str) -> None:
    report = examine([golden_dir / name])
    assert not report.ok
    assert "needs a main model" in reasons(only(report))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>Please log in</html>", "a web page, not a model"),
        (b'{"error": "gated"}', "JSON text, not a model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\0" * 100, "zeros where the header should be"),
        (b"some text that is no model at all", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
    ],
)
def test_files_of_other_kinds_have_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    file = only(examine([path]))
    assert (file.role, file.ok, file.truncated) == ("unreadable", False, False)
    assert file.size == len(content)
    assert reason in reasons(file)
    assert all(problem.fix for problem in file.problems)


def test_paths_without_a_file_have_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    report = examine([tmp_path / "nope.gguf", folder, pipe, Path("a\0b"), Path("")])
    texts = [reasons(file) for file in report.files]
    expected = ["does not exist", "without a .gguf file", "not a regular file", "cannot be read"]
    assert all(text in found for text, found in zip(expected, texts, strict=False)), texts
    assert not any(file.ok for file in report.files)


@pytest.mark.parametrize("keep", [0.999, 0.5])
def test_a_cut_file_is_truncated(golden_dir: Path, tmp_path: Path, keep: float) -> None:
    data = (golden_dir / "tiny-iq2.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * keep)])
    file = only(examine([path]))
    assert (file.role, file.truncated) == ("unreadable", True)
    assert f"found {path.stat().st_size}" in reasons(file)


def test_a_missing_tensor_is_not_truncation(changed: Callable[..., Path]) -> None:
    path = changed("tiny-iq2.gguf", lambda keys, tensors: tensors.pop("blk.2.attn_kv.weight"))
    file = only(examine([path]))
    assert (file.role, file.ok, file.truncated) == ("main", False, False)
    assert "tensors missing: blk.2.attn_kv.weight" in reasons(file)
    assert "cut off" not in reasons(file)
    assert file.dimensions is not None
    assert file.cache is not None
    assert file.traffic is None


def test_all_reasons_are_given_at_once(changed: Callable[..., Path]) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        del tensors["output_norm.weight"]
        tensors["blk.1.attn_sinks.weight"] = tensor(np.zeros(5, np.float32))
        keys["tokenizer.ggml.pre"] = "llama-bpe"

    file = only(examine([changed("tiny-f32.gguf", change)]))
    text = reasons(file)
    for part in ("output_norm.weight", "blk.1.attn_sinks.weight has shape (5,)", "llama-bpe"):
        assert part in text
    assert file.verdict == "does not run: 2 reasons"


def test_missing_keys_are_all_named(changed: Callable[..., Path]) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        del keys["deepseek4.rope.scaling.type"], keys["deepseek4.expert_used_count"]

    file = only(examine([changed("tiny-f32.gguf", change)]))
    assert "rope.scaling.type" in reasons(file)
    assert "expert_used_count" in reasons(file)
    assert (file.role, file.dimensions, file.cache) == ("main", None, None)
    assert file.census


def test_another_architecture(changed: Callable[..., Path]) -> None:
    path = changed(
        "tiny-f32.gguf", lambda keys, tensors: keys.update({"general.architecture": "x"})
    )
    file = only(examine([path]))
    assert (file.role, file.ok, file.architecture) == ("other", False, "x")
    assert "architecture 'x'" in reasons(file)
    keys, tensors = contents(path)
    del keys["general.architecture"]
    file = only(examine([write(path, keys, tensors)]))
    assert (file.role, file.architecture) == ("other", None)


def test_wrong_arguments_are_usage_errors(golden_dir: Path) -> None:
    main = golden_dir / "tiny-f32.gguf"
    with pytest.raises(UsageError):
        examine([])
    for context in (0, -5, 1 << 40):
        with pytest.raises(UsageError):
            examine([main], context=context)
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError):
            examine([main], bandwidth_gbs=speed)


def test_a_context_beyond_the_models_is_noted(golden_dir: Path) -> None:
    file = only(examine([golden_dir / "tiny-f32.gguf"], context=100_000))
    assert any("more than the model's 65536" in note for note in file.notes)


# --- shards --------------------------------------------------------------------------------------


def test_a_split_model_is_one_entry(golden_dir: Path, tmp_path: Path) -> None:
    keys, tensors = contents(golden_dir / "tiny-iq2.gguf")
    shards = split(tmp_path / "split", "big", keys, tensors, 3)
    whole = only(examine([golden_dir / "tiny-iq2.gguf"]))
    for given_paths in (shards, [shards[1]], [tmp_path / "split"]):
        report = examine(given_paths)
        assert report.ok, reasons(only(report))
        assert only(report).split is not None
        assert (only(report).split.total, only(report).split.missing) == (3, ())  # type: ignore
        assert only(report).census == whole.census


def test_missing_shards_are_listed_once(golden_dir: Path, tmp_path: Path) -> None:
    keys, tensors = contents(golden_dir / "tiny-iq2.gguf")
    shards = split(tmp_path, "big", keys, tensors, 4)
    shards[1].unlink()
    shards[2].unlink()
    file = only(examine([shards[0], shards[3]]))
    assert file.split is not None
    assert file.split.missing == (shards[1].name, shards[2].name)
    assert shards[1].name in reasons(file)
    assert shards[2].name in reasons(file)
    assert not file.truncated
    assert f"missing: {shards[1].name}" in shown(examine([shards[0]])).replace("\n", "")


def test_a_cut_shard_is_truncation(golden_dir: Path, tmp_path: Path) -> None:
    keys, tensors = contents(golden_dir / "tiny-iq2.gguf")
    shards = split(tmp_path, "big", keys, tensors, 3)
    shards[1].write_bytes(shards[1].read_bytes()[:-4096])
    file = only(examine([shards[0]]))
    assert file.truncated
    assert shards[1].name in reasons(file)


def test_a_folder_is_all_its_models(golden_dir: Path) -> None:
    report = examine([golden_dir, golden_dir / "tiny-f32.gguf"])
    assert len(report.files) == 9
    assert report.ok, [reasons(file) for file in report.files]


# --- claims and drafters -------------------------------------------------------------------------


def test_a_claimed_block_that_is_not_counted_is_a_note(changed: Callable[..., Path]) -> None:
    path = changed(
        "tiny-iq2.gguf", lambda keys, t: keys.update({"deepseek4.nextn_predict_layers": 1})
    )
    file = only(examine([path]))
    assert file.ok
    assert file.drafter is not None
    assert (file.drafter.claimed, file.drafter.layout) == (1, None)
    assert any("claim 1 MTP layer, but no MTP tensor" in note for note in file.notes)


@pytest.mark.parametrize("clamps", [6, 7])
def test_a_counted_block_without_tensors_does_not_run(
    changed: Callable[..., Path], clamps: int
) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        keys["deepseek4.nextn_predict_layers"] = 1
        keys["deepseek4.block_count"] = 7
        for key in ("exp", "shexp"):
            keys[f"deepseek4.swiglu_clamp_{key}"] = [10.0] * clamps

    file = only(examine([changed("tiny-iq2.gguf", change)]))
    assert not file.ok
    expected = {6: "swiglu_clamp_exp has 6 entries", 7: "metadata says 7 blocks, tensors cover 6"}
    assert expected[clamps] in reasons(file)
    assert "claim 1 MTP block as part of block_count=7" in reasons(file)
    assert "set deepseek4.block_count to 6" in reasons(file)


def test_a_support_file_without_its_tensors(tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "general.architecture": "deepseek4_mtp_support",
        "deepseek4.mtp_layer_count": 1,
    }
    path = write(tmp_path / "s.gguf", keys, {"x": tensor(np.zeros(4, np.float32))})
    file = only(examine([path]))
    assert (file.role, file.ok) == ("mtp", False)
    assert "holds no MTP block; its metadata claim 1" in reasons(file)


def test_trunk_and_block_in_one_file_are_degraded(golden_dir: Path, tmp_path: Path) -> None:
    keys, tensors = contents(golden_dir / "tiny-iq2.llama-mtp.gguf")
    path = write(tmp_path / "one.gguf", keys, tensors | contents(golden_dir / "tiny-iq2.gguf")[1])
    file = only(examine([path]))
    assert (file.role, file.ok, file.verdict) == (
        "main",
        True,
        "runs, drafts with its own MTP block",
    )
    assert file.drafter is not None
    assert file.drafter.degraded is not None
    assert "accepted less often" in shown(examine([path])).replace("\n", " ")
    # the head's hyper-connection and norm belong to the trunk already
    assert file.memory is not None
    assert file.memory.weights + file.memory.mtp == sum(c.bytes for c in file.census)


def test_a_broken_own_block_does_not_run(golden_dir: Path, tmp_path: Path) -> None:
    keys, tensors = contents(golden_dir / "tiny-iq2.llama-mtp.gguf")
    del tensors["blk.6.attn_kv.weight"]
    path = write(tmp_path / "one.gguf", keys, tensors | contents(golden_dir / "tiny-iq2.gguf")[1])
    file = only(examine([path]))
    assert not file.ok
    assert "blk.6.attn_kv.weight" in reasons(file)
    assert "mtp.draft=0" in reasons(file)


@pytest.mark.parametrize("name", ["mtp.0.main_proj.weight", "dspark.x.weight", "a.markov_head.w"])
def test_a_file_with_only_dspark_is_named(tmp_path: Path, name: str) -> None:
    keys: dict[str, object] = {"general.architecture": "deepseek4"}
    path = write(tmp_path / "d.gguf", keys, {name: tensor(np.zeros((4, 4), np.float32))})
    file = only(examine([path]))
    assert (file.role, file.ok) == ("dspark", False)
    assert "DSpark" in reasons(file)
    assert name in reasons(file)


def test_the_dspark_architecture_is_named(tmp_path: Path) -> None:
    keys: dict[str, object] = {"general.architecture": "dflash"}
    path = write(tmp_path / "d.gguf", keys, {"x": tensor(np.zeros(4, np.float32))})
    file = only(examine([path]))
    assert (file.role, file.ok) == ("dspark", False)
    assert "DSpark" in reasons(file)


def test_a_main_file_with_dspark_runs_without_drafts(changed: Callable[..., Path]) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tensors["mtp.0.main_proj.weight"] = tensor(np.zeros((4, 4), np.float32))
        keys["deepseek4.attention.compress_ratios"] = As("INT32", [0, 0, 4, 128, 4, 128, 0, 0, 0])

    file = only(examine([changed("tiny-f32.gguf", change)]))
    assert file.ok
    assert file.verdict.startswith("runs without drafts")
    assert any("DSpark (mtp.0.main_proj.weight)" in note for note in file.notes)
    assert any("9 entries for 6 layers" in note for note in file.notes)


# --- which block belongs to which model ----------------------------------------------------------


def test_a_block_of_other_dimensions_does_not_fit(
    golden_dir: Path, changed: Callable[..., Path]
) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tensors["mtp.0.ffn_gate_inp.weight"] = tensor(np.zeros((16, 256), np.float16))

    block = changed("tiny-iq2.mtp-support.gguf", change)
    report = examine([golden_dir / "tiny-iq2.gguf", block])
    assert not report.ok
    assert report.files[0].ok
    assert report.files[0].verdict.startswith("runs without drafts")
    assert "number of experts" in reasons(report.files[1])
    assert not report.files[1].fits[0].ok


def test_a_block_of_another_vocabulary_does_not_fit(
    golden_dir: Path, changed: Callable[..., Path]
) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tokens = list(keys["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
        tokens[-1] = "other"
        keys["tokenizer.ggml.tokens"] = tokens

    report = examine([golden_dir / "tiny-iq2.gguf", changed("tiny-iq2.llama-mtp.gguf", change)])
    assert not report.ok
    assert "'other'" in reasons(report.files[1])
    assert report.files[1].fits[0].same_tokenizer is False


def test_other_merges_are_noted(golden_dir: Path, changed: Callable[..., Path]) -> None:
    def change(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        keys["tokenizer.ggml.merges"] = keys["tokenizer.ggml.merges"][:-1]  # type: ignore[index]

    report = examine([golden_dir / "tiny-iq2.gguf", changed("tiny-iq2.llama-mtp.gguf", change)])
    assert report.ok
    assert report.files[1].fits[0].same_tokenizer is False
    assert any("types or merges" in note for note in report.files[1].notes)


def test_a_block_is_compared_with_every_main_file(golden_dir: Path) -> None:
    block = golden_dir / "tiny-iq2.llama-mtp.gguf"  # its window is 128, tiny-f32 has 32
    mains = [golden_dir / "tiny-f32.gguf", golden_dir / "tiny-iq2.gguf"]
    report = examine([*mains, block])
    assert [fit.ok for fit in report.files[2].fits] == [False, True]
    assert report.ok
    assert report.files[0].verdict.startswith("runs without drafts")
    assert report.files[1].verdict == f"runs, drafts with {block}"
    report = examine([mains[0], block])
    assert not report.ok
    assert "made for another model" in reasons(report.files[1])


def test_a_block_beside_a_main_file_without_configuration(
    golden_dir: Path, changed: Callable[..., Path]
) -> None:
    main = changed("tiny-iq2.gguf", lambda keys, t: keys.pop("deepseek4.expert_count"))
    report = examine([main, golden_dir / "tiny-iq2.mtp-support.gguf"])
    assert [file.ok for file in report.files] == [False, False]
    assert "cannot be compared with changed.gguf" in reasons(report.files[1])


# --- accounting: the published model -------------------------------------------------------------

FLASH: dict[str, object] = {
    "general.architecture": "deepseek4",
    "deepseek4.block_count": 43,
    "deepseek4.context_length": 1048576,
    "deepseek4.embedding_length": 4096,
    "deepseek4.vocab_size": 129280,
    "deepseek4.attention.head_count": 64,
    "deepseek4.attention.head_count_kv": 1,
    "deepseek4.attention.key_length": 512,
    "deepseek4.attention.value_length": 512,
    "deepseek4.attention.q_lora_rank": 1024,
    "deepseek4.attention.output_group_count": 8,
    "deepseek4.attention.output_lora_rank": 1024,
    "deepseek4.attention.sliding_window": 128,
    "deepseek4.attention.layer_norm_rms_epsilon": 1e-6,
    "deepseek4.attention.compress_ratios": As("INT32", [0, 0, *[4, 128] * 20, 4, 0]),
    "deepseek4.attention.compress_rope_freq_base": 160000.0,
    "deepseek4.attention.indexer.head_count": 64,
    "deepseek4.attention.indexer.key_length": 128,
    "deepseek4.attention.indexer.top_k": 512,
    "deepseek4.rope.dimension_count": 64,
    "deepseek4.rope.freq_base": 10000.0,
    "deepseek4.rope.scaling.type": "yarn",
    "deepseek4.rope.scaling.factor": 16.0,
    "deepseek4.rope.scaling.original_context_length": 65536,
    "deepseek4.expert_count": 256,
    "deepseek4.expert_used_count": 6,
    "deepseek4.expert_shared_count": 1,
    "deepseek4.expert_feed_forward_length": 2048,
    "deepseek4.expert_gating_func": 4,
    "deepseek4.expert_weights_norm": True,
    "deepseek4.expert_weights_scale": 1.5,
    "deepseek4.swiglu_clamp_exp": [10.0] * 43,
    "deepseek4.hyper_connection.count": 4,
    "deepseek4.hyper_connection.sinkhorn_iterations": 20,
    "deepseek4.hyper_connection.epsilon": 1e-6,
    "deepseek4.hash_layer_count": 3,
    "deepseek4.nextn_predict_layers": 1,
}
Q2, Q4, MXFP4 = ("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("MXFP4", "MXFP4")
HALF = ("_fn", "compressor_kv", "compressor_gate", "_ape", "ffn_gate_inp", "token_embd", "proj")


def published_type(name: str, experts: tuple[str, str], mtp: bool = False) -> str:
    """Stored type of a tensor of the published files."""
    leaf = name.removesuffix(".weight").split(".")[-1]
    if leaf.endswith("_exps"):
        return experts["down" in leaf]
    if leaf.endswith("tid2eid"):
        return "I32"
    if leaf.endswith(("norm", "sinks", "bias", "base", "scale")):
        return "F32"
    if leaf in ("e_proj", "h_proj"):
        return "Q8_0"
    if leaf.endswith(HALF) or "indexer" in name:
        return "F32" if mtp else "F16"
    return "Q8_0"


def laid_out(
    shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str]
) -> dict[str, TensorInfo]:
    """Tensors one after another, as a file without a header would hold them."""
    infos, offset = {}, 0
    for name, shape in shapes.items():
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kinds[name]]]
        nbytes = math.prod(shape) // block * size
        infos[name] = TensorInfo(name, kinds[name], shape, offset, nbytes)
        offset += -(-nbytes // 32) * 32
    return infos


def flash_trunk(c: ModelConfig, experts: tuple[str, str]) -> dict[str, TensorInfo]:
    shapes = {slot.name: slot.shape for slot in trunk_slots(c)}
    return laid_out(shapes, {name: published_type(name, experts) for name in shapes})


def flash_support(c: ModelConfig) -> dict[str, TensorInfo]:
    shapes = {f"mtp.0.{name}.weight": (c.dim, c.dim) for name in ("e_proj", "h_proj")}
    shapes |= {f"mtp.0.{name}.weight": (c.dim,) for name in ("enorm", "hnorm", "norm")}
    slots = [
        *hyper_slots("mtp.0.hc_head", c, head=True),
        *layer_slots("mtp.0.", c, 0, hashed=False),
    ]
    shapes |= {slot.name: slot.shape for slot in slots}
    return laid_out(shapes, {name: published_type(name, Q4, mtp=True) for name in shapes})


def write_sparse(path: Path, keys: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Path:
    """A file of full length of which only the header takes room on the disk."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    head += [string(key) + encode(value) for key, value in keys.items()]
    for info in tensors.values():
        dims = info.shape[::-1]
        kind = GGMLQuantizationType[info.type]
        head.append(string(info.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        head.append(struct.pack("<IQ", kind, info.offset))
    data = b"".join(head)
    last = list(tensors.values())[-1]
    with path.open("wb") as stream:
        stream.write(data)
        stream.truncate(-(-len(data) // 32) * 32 + last.offset + last.nbytes)
    return path


@pytest.fixture(scope="module")
def flash(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("flash") / "keys.gguf"
    return ModelConfig.from_gguf(GgufFile.open(write(path, FLASH, {})))


def test_bytes_per_token_of_the_published_model(flash: ModelConfig) -> None:
    groups = {g.name: g.bytes for g in weight_groups(flash_trunk(flash, Q2), flash)}
    assert groups == {
        "attn_q_b": 1_533_018_112,
        "attn_output_a": 1_533_018_112,
        "attn_output_b": 1_533_018_112,
        "shared expert": 1_149_763_584,
        "output": 562_626_560,
        "attention compressors": 520_241_152,
        "indexer queries": 363_331_584,
        "attn_q_a": 191_627_264,
        "attn_kv": 95_813_632,
        "router": 90_177_536,
        "indexer compressors": 88_101_888,
        "hyper-connections": 67_642_440,
        "norms, sinks, biases, head, one embedding row": 1_880_924,
        "routed gate+up": 1_115_947_008,
        "routed down": 710_148_096,
    }


@pytest.mark.parametrize(
    ("experts", "routed", "total"),
    [
        (Q2, 1_826_095_104, 9_556_356_004),
        (Q4, 3_652_190_208, 11_382_451_108),
        (MXFP4, 3_449_290_752, None),
    ],
)
def test_totals_per_token(
    flash: ModelConfig, experts: tuple[str, str], routed: int, total: int | None
) -> None:
    cost = traffic(flash_trunk(flash, experts), flash, 32768, None, None)
    assert (cost.fixed, cost.routed) == (7_730_260_900, routed)
    assert cost.weights == (total or 7_730_260_900 + routed)
    assert cost.index_queries_from == 2051


def test_indexer_queries_are_read_late(flash: ModelConfig) -> None:
    tensors = flash_trunk(flash, Q2)
    before, after = (traffic(tensors, flash, context, None, None) for context in (2051, 2052))
    assert after.weights - before.weights == 363_331_584
    assert round(before.weights / 1e9, 2) == 9.19


@pytest.mark.parametrize(
    ("experts", "gigabytes", "ratios"),
    [
        (Q2, (9.56, 11.34, 13.08, 14.78), (1.00, 1.19, 1.37, 1.55)),
        (Q4, (11.38, 14.95, 18.43, 21.83), (1.00, 1.31, 1.62, 1.92)),
    ],
)
def test_bytes_of_several_rows(
    flash: ModelConfig,
    experts: tuple[str, str],
    gigabytes: tuple[float, ...],
    ratios: tuple[float, ...],
) -> None:
    cost = traffic(flash_trunk(flash, experts), flash, 4096, 831_290_860, 500.0)
    weights = [width.bytes - cost.cache for width in cost.widths]
    assert [round(size / 1e9, 2) for size in weights] == list(gigabytes)
    assert [round(size / weights[0], 2) for size in weights] == list(ratios)
    assert [round(width.experts, 2) for width in cost.widths] == [6.0, 11.86, 17.58, 23.17]
    for width in cost.widths:
        assert width.cycle_bytes == width.bytes + (width.rows - 1) * 831_290_860
        assert width.break_even == pytest.approx(width.cycle_bytes / cost.widths[0].bytes)
        assert width.tokens_per_second == pytest.approx(width.rows * 500e9 / width.cycle_bytes)


def test_a_draft_step_of_the_published_block(flash: ModelConfig) -> None:
    block, main = flash_support(flash), flash_trunk(flash, Q2)
    assert len(block) == 32
    assert sum(info.nbytes for info in block.values()) == 3_807_600_108
    assert draft_bytes(block, main, flash) == 831_290_860


@pytest.mark.parametrize(
    ("context", "megabytes"),
    [(1024, 11.3), (4096, 22.8), (16384, 41.3), (65536, 115), (131072, 214), (1048576, 1590)],
)
def test_cache_rows_read(flash: ModelConfig, context: int, megabytes: float) -> None:
    size = cache_read(flash, context - 1, F16) / 1e6
    assert float(f"{size:.3g}") == megabytes
    assert cache_read(flash, context - 1) == 2 * cache_read(flash, context - 1, F16)


def test_the_published_cache_size(flash: ModelConfig) -> None:
    size = cache_size(flash, 32768)
    assert (size.per_token, size.published_per_token) == (13760, 6880)
    windows, state = 44 * 128 * 512 * 2, (1.3125 + 0.328125 + 10) * 2**20
    assert size.published_bytes == 215 * 2**20 + windows + state


@pytest.mark.parametrize("name", GOLDEN_NAMES)
@pytest.mark.parametrize("context", [1, 130, 4099])
@pytest.mark.parametrize(("chunk", "draft"), [(64, 1), (8, 16)])
def test_the_cache_size_is_the_caches(
    golden_dir: Path, name: str, context: int, chunk: int, draft: int
) -> None:
    config = ModelConfig.from_gguf(GgufFile.open(golden_dir / f"{name}.gguf"))
    cache = KVCache(config, context=context, draft_max=draft, chunk=chunk)
    assert cache_size(config, context, max(chunk, draft + 1)).bytes == cache.nbytes


def test_a_file_of_eighty_gigabytes_is_not_read(
    flash: ModelConfig, golden_dir: Path, tmp_path: Path
) -> None:
    """The whole doctor on files with the published dimensions; only their headers exist."""
    golden = contents(golden_dir / "tiny-iq2.gguf")[0]
    vocabulary = {key: value for key, value in golden.items() if key.startswith("tokenizer.")}
    vocabulary["tokenizer.ggml.token_type"] = As("INT32", vocabulary["tokenizer.ggml.token_type"])
    main = write_sparse(tmp_path / "main.gguf", FLASH | vocabulary, flash_trunk(flash, Q2))
    keys = {"general.architecture": "deepseek4_mtp_support", "deepseek4.expert_count": 256}
    support = write_sparse(tmp_path / "mtp.gguf", keys, flash_support(flash))
    report = examine([main, support], context=65536, bandwidth_gbs=400.0)
    assert report.ok, [reasons(file) for file in report.files]
    first = report.files[0]
    assert sum(count.tensors for count in first.census) == 1328
    assert sum(count.bytes for count in first.census) == 86_714_775_900
    assert first.size == main.stat().st_size > 80 * 2**30
    assert main.stat().st_blocks * 512 < 2**20
    assert first.traffic is not None
    assert (first.traffic.weights, first.traffic.draft) == (9_556_356_004, 831_290_860)
    assert first.memory is not None
    assert (first.memory.weights, first.memory.mtp) == (86_714_775_900, 3_807_600_108)
    assert any("claim 1 MTP layer" in note for note in first.notes)


# --- conversion ----------------------------------------------------------------------------------


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    file = GgufFile.open(path)
    return {n: (i.type, i.shape, file.array(n).tobytes()) for n, i in file.tensors.items()}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_conversion_gives_the_other_layouts_bytes(
    golden_dir: Path, tmp_path: Path, name: str
) -> None:
    support = golden_dir / f"{name}.mtp-support.gguf"
    sidecar = golden_dir / f"{name}.llama-mtp.gguf"
    main = GgufFile.open(golden_dir / f"{name}.gguf")
    to_sidecar, to_support = tmp_path / "n.gguf", tmp_path / "s.gguf"
    assert convert_mtp(GgufFile.open(support), to_sidecar, "nextn", main) == to_sidecar
    assert stored(to_sidecar) == stored(sidecar)
    convert_mtp(GgufFile.open(sidecar), to_support, "mtp.0")
    assert stored(to_support) == stored(support)
    report = examine([main.path, to_sidecar, to_support])
    assert report.ok, [reasons(file) for file in report.files]
    # metadata of the converted sidecar say what the independent one says
    written, independent = GgufFile.open(to_sidecar).metadata, GgufFile.open(sidecar).metadata
    assert written == independent
    types = gguf.GGUFReader(to_sidecar).fields
    assert types["deepseek4.swiglu_clamp_exp"].types[-1] == gguf.GGUFValueType.FLOAT32


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_round_trips_keep_every_byte(golden_dir: Path, tmp_path: Path, name: str) -> None:
    main = GgufFile.open(golden_dir / f"{name}.gguf")
    config = ModelConfig.from_gguf(main)
    support = golden_dir / f"{name}.mtp-support.gguf"
    sidecar = golden_dir / f"{name}.llama-mtp.gguf"
    a = convert_mtp(GgufFile.open(support), tmp_path / "a.gguf", "nextn", main)
    b = convert_mtp(GgufFile.open(a), tmp_path / "b.gguf", "mtp.0", main)
    assert stored(b) == stored(support)
    c = convert_mtp(GgufFile.open(sidecar), tmp_path / "c.gguf", "mtp.0")
    d = convert_mtp(GgufFile.open(c), tmp_path / "d.gguf", "nextn", main)
    assert stored(d) == stored(sidecar)
    weights = [load_mtp(GgufFile.open(path), config, main) for path in (support, a, b, c, d)]
    for other in weights[1:]:
        assert torch.equal(other.e_proj.data, weights[0].e_proj.data)
        assert torch.equal(other.h_proj.data, weights[0].h_proj.data)
        assert torch.equal(other.head.hc.fn.data, weights[0].head.hc.fn.data)
        assert torch.equal(other.head.norm, weights[0].head.norm)


def test_a_split_main_file_lends_its_parts(golden_dir: Path, tmp_path: Path) -> None:
    keys, tensors = contents(golden_dir / "tiny-q4k.gguf")
    keys["general.alignment"] = 64
    main = GgufFile.open(split(tmp_path, "big", keys, tensors, 3)[0])
    source = GgufFile.open(golden_dir / "tiny-q4k.mtp-support.gguf")
    path = convert_mtp(source, tmp_path / "n.gguf", "nextn", main)
    assert stored(path) == stored(golden_dir / "tiny-q4k.llama-mtp.gguf")
    assert not [key for key in GgufFile.open(path).metadata if key.startswith("split.")]


def test_short_arrays_are_lengthened(golden_dir: Path, tmp_path: Path) -> None:
    """Main files without an entry for the block, and with one clamp for all layers."""
    keys, tensors = contents(golden_dir / "tiny-iq2.gguf")
    keys["deepseek4.attention.compress_ratios"] = As("INT32", [0, 0, 4, 128, 4, 128])
    keys["deepseek4.swiglu_clamp_exp"] = 10.0
    del keys["deepseek4.swiglu_clamp_shexp"]
    main = GgufFile.open(write(tmp_path / "main.gguf", keys, tensors))
    source = GgufFile.open(golden_dir / "tiny-iq2.mtp-support.gguf")
    path = convert_mtp(source, tmp_path / "n.gguf", "nextn", main)
    metadata = GgufFile.open(path).metadata
    assert metadata["deepseek4.attention.compress_ratios"] == [0, 0, 4, 128, 4, 128, 0]
    assert metadata["deepseek4.swiglu_clamp_exp"] == [10.0] * 7
    assert metadata["deepseek4.swiglu_clamp_shexp"] == [10.0] * 7


def test_a_sidecar_without_its_own_norm_takes_the_trunks(
    golden_dir: Path, changed: Callable[..., Path], tmp_path: Path
) -> None:
    name = "blk.6.nextn.shared_head_norm.weight"
    sidecar = changed("tiny-f32.llama-mtp.gguf", lambda keys, tensors: tensors.pop(name))
    path = convert_mtp(GgufFile.open(sidecar), tmp_path / "s.gguf", "mtp.0")
    norm = stored(golden_dir / "tiny-f32.gguf")["output_norm.weight"]
    assert stored(path)["mtp.0.norm.weight"] == norm


def test_impossible_conversions_are_refused(
    golden_dir: Path, changed: Callable[..., Path], tmp_path: Path
) -> None:
    main = GgufFile.open(golden_dir / "tiny-iq2.gguf")
    support = GgufFile.open(golden_dir / "tiny-iq2.mtp-support.gguf")
    sidecar = GgufFile.open(golden_dir / "tiny-iq2.llama-mtp.gguf")
    target = tmp_path / "out.gguf"

    def refused(
        kind: type[Ds4FlowError], text: str, source: GgufFile, layout: str, main: GgufFile | None
    ) -> None:
        with pytest.raises(kind, match=text):
            convert_mtp(source, target, layout, main)  # type: ignore[arg-type]
        assert not target.exists()

    refused(UsageError, "has the layout mtp.0 already", support, "mtp.0", main)
    refused(UsageError, "has the layout nextn already", sidecar, "nextn", main)
    refused(UsageError, "main file, which was not given", support, "nextn", None)
    refused(ModelFileError, "holds no MTP block", main, "nextn", main)
    refused(ModelFileError, "sidecar", support, "nextn", sidecar)
    other = GgufFile.open(golden_dir / "tiny-f32.gguf")
    refused(ModelFileError, "made for another model", sidecar, "mtp.0", other)

    def one_type(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tensors["mtp.0.h_proj.weight"] = tensor(np.zeros((256, 256), np.float16))

    def extra(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tensors["note.weight"] = tensor(np.zeros(4, np.float32))

    def embed(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tensors["blk.6.nextn.embed_tokens.weight"] = tensor(np.zeros((320, 256), np.float16))

    def incomplete(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        del tensors["mtp.0.hnorm.weight"]

    def both(keys: dict[str, object], tensors: dict[str, Raw]) -> None:
        tensors |= contents(golden_dir / "tiny-iq2.gguf")[1] | tensors

    for name, change, layout, text in (
        ("mtp-support", one_type, "nextn", "they would have one type"),
        ("mtp-support", extra, "nextn", "note.weight has no place"),
        ("llama-mtp", extra, "mtp.0", "note.weight has no place"),
        ("llama-mtp", embed, "mtp.0", "embed_tokens.weight has no place"),
        ("mtp-support", incomplete, "nextn", "mtp.0.hnorm.weight"),
        ("llama-mtp", both, "mtp.0", "holds trunk and MTP block"),
    ):
        source = GgufFile.open(changed(f"tiny-iq2.{name}.gguf", change))
        refused(ModelFileError, text, source, layout, main)


def test_nothing_is_overwritten_or_left_half(
    golden_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GgufFile.open(golden_dir / "tiny-iq2.llama-mtp.gguf")
    target = tmp_path / "s.gguf"
    target.write_text("mine")
    with pytest.raises(Ds4FlowError, match="exists and is not overwritten"):
        convert_mtp(source, target, "mtp.0")
    assert target.read_text() == "mine"
    with pytest.raises(Ds4FlowError, match="no folder"):
        convert_mtp(source, tmp_path / "no" / "s.gguf", "mtp.0")
    target.unlink()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Ds4FlowError, match="No space left"):
            convert_mtp(source, target, "mtp.0")
    assert list(tmp_path.iterdir()) == []

    def meanwhile(here: Path, there: Path) -> None:
        there.write_text("came first")
        raise FileExistsError(17, "File exists")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", meanwhile)
        with pytest.raises(Ds4FlowError, match="exists and is not overwritten"):
            convert_mtp(source, target, "mtp.0")
    assert target.read_text() == "came first"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_system_without_links(
    golden_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(here: Path, there: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    source = GgufFile.open(golden_dir / "tiny-iq2.llama-mtp.gguf")
    path = convert_mtp(source, tmp_path / "s.gguf", "mtp.0")
    assert stored(path) == stored(golden_dir / "tiny-iq2.mtp-support.gguf")
    assert list(tmp_path.iterdir()) == [path]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_and_exits(
    golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = golden_dir / "tiny-f32.gguf"
    assert inspect_command([main], False, 1024, 100.0, False, None) == 0
    assert "runs without drafts" in capsys.readouterr().out
    bad = tmp_path / "bad.gguf"
    bad.write_text("<html>")
    assert inspect_command([main, bad], True, 1024, None, False, None) == 1
    report = json.loads(capsys.readouterr().out)
    assert [file["ok"] for file in report["files"]] == [True, False]
    assert report["ok"] is False


def test_the_command_converts(
    golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = golden_dir / "tiny-f32.gguf"
    support = tmp_path / "mtp.gguf"
    support.write_bytes((golden_dir / "tiny-f32.mtp-support.gguf").read_bytes())
    assert inspect_command([support, main], False, 1024, None, True, None) == 0
    sidecar = tmp_path / "mtp.nextn.gguf"
    assert str(sidecar) in capsys.readouterr().out
    back = tmp_path / "back.gguf"
    assert inspect_command([sidecar], True, 1024, None, True, back) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "mtp.0"
    assert stored(back) == stored(support)
    for paths, error in (
        ([main], "needs one file with an MTP block, 0"),
        ([support, sidecar], "needs one file with an MTP block, 2"),
        ([support, main, golden_dir / "tiny-iq2.gguf"], "one main file, 2"),
    ):
        with pytest.raises(UsageError, match=error):
            inspect_command(paths, False, 1024, None, True, tmp_path / "x.gguf")
    with pytest.raises(ModelFileError, match="does not exist"):
        inspect_command([tmp_path / "nope.gguf"], False, 1024, None, True, None)
    with pytest.raises(UsageError, match="--output"):
        inspect_command([main], False, 1024, None, False, tmp_path / "x.gguf")


def test_text_from_files_is_not_interpreted(changed: Callable[..., Path]) -> None:
    name = "\x1b[31mred\x07[bold]loud[/bold]\r\n\u202e"
    path = changed("tiny-f32.gguf", lambda keys, tensors: keys.update({"general.name": name}))
    text = shown(examine([path]))
    assert "\x1b[31mred" not in text
    assert "\\x1b[31mred\\x07[bold]loud[/bold]\\r\\n\\u202e" in text


def test_files_of_other_kinds_do_not_load_torch(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<html>")
    code = (
        "import sys; from pathlib import Path; from ds4flow.doctor import examine; "
        f"examine([Path({str(path)!r})]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- damage --------------------------------------------------------------------------------------


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), name=st.sampled_from(["mtp-support", "llama-mtp", ""]))
def test_damaged_headers_become_entries(
    golden_dir: Path, tmp_path: Path, data: st.DataObject, name: str
) -> None:
    """Whatever bytes of a header are changed, the report has an entry and JSON can hold it."""
    golden = golden_dir / (f"tiny-iq2.{name}.gguf" if name else "tiny-iq2.gguf")
    end = min(info.offset for info in GgufFile.open(golden).tensors.values())
    path = tmp_path / "damaged.gguf"
    path.write_bytes(golden.read_bytes())
    with path.open("r+b") as stream:
        for _ in range(data.draw(st.integers(1, 4))):
            stream.seek(data.draw(st.integers(0, end - 1)))
            stream.write(data.draw(st.binary(min_size=1, max_size=8)))
    report = examine([golden_dir / "tiny-iq2.gguf", path])
    assert len(report.files) == 2
    assert report.files[1].ok or report.files[1].problems
    json.loads(report.to_json())
    shown(report)
