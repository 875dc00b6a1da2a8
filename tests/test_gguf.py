"""The reader: agrees with the format's own, and refuses every damaged file for the right reason."""

from __future__ import annotations

import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4flow.errors import Ds4FlowError, ModelFileError, TruncatedFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ModelConfig
from ds4flow.model.mtp_weights import find_mtp_layout, load_mtp
from ds4flow.model.weights import load_trunk
from ds4flow.quants import can_decode, from_gguf
from tests.gguf_files import (
    As,
    Raw,
    bfloat16,
    encode,
    encode_file,
    split,
    string,
    tensor,
    write,
)

METADATA: dict[str, object] = {
    "general.architecture": "deepseek4",
    "a.text": "Grüße",
    "a.true": True,
    "a.byte": As("INT8", -3),
    "a.long": As("UINT64", 1 << 60),
    "a.real": As("FLOAT64", 0.1),
    "a.texts": ["x", "", "ḃ"],
    "a.flags": [True, False],
    "a.shorts": As("INT16", [-1, 2, 3]),
    "a.nothing": As("FLOAT32", []),
}
ROWS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TENSORS = {
    "cube": tensor(ROWS),
    "half": tensor(np.array([1.5, -2.0], np.float16)),
    "brain": bfloat16(np.array([[1.0, -3.0]], np.float32)),
    "ids": tensor(np.array([[1, 2], [3, 4], [5, 6]], np.int32)),
    "blocks": Raw("Q8_0", (2, 3, 64), bytes(i % 251 for i in range(2 * 3 * 68))),
}
SOUND = encode_file(METADATA, TENSORS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf", METADATA, TENSORS)


def refused(path: Path, data: bytes) -> ModelFileError:
    """The error that a file with these bytes gives; it always names the file and a remedy."""
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    assert path.name in caught.value.what
    assert caught.value.fix
    return caught.value


# --- sound files ----------------------------------------------------------------------------------


def test_metadata_are_plain_values(path: Path):
    expected = {k: v.value if isinstance(v, As) else v for k, v in METADATA.items()}
    file = GgufFile.open(path)
    assert dict(file.metadata) == expected
    assert file.metadata["a.true"] is True
    assert file.size == path.stat().st_size
    assert file.shards == (path,)


def test_tensors_come_in_torch_order_and_read_only(path: Path):
    file = GgufFile.open(path)
    assert list(file.tensors) == list(TENSORS)
    np.testing.assert_array_equal(file.array("cube"), ROWS)
    assert file.array("half").tolist() == [1.5, -2.0]
    assert file.array("brain").dtype == np.uint16
    assert file.array("ids").dtype == np.int32
    blocks = file.array("blocks")
    assert blocks.shape == (2, 3, 68)
    assert blocks.tobytes() == TENSORS["blocks"].data
    for name in TENSORS:
        assert not file.array(name).flags.writeable
        assert np.shares_memory(file.array(name), file.array(name))


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-iq2.llama-mtp", "tiny-q4k.mtp-support"])
def test_agrees_with_the_reader_of_the_format_itself(golden_dir: Path, name: str):
    file = GgufFile.open(golden_dir / f"{name}.gguf")
    theirs = gguf.GGUFReader(golden_dir / f"{name}.gguf")
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
    assert len(file.metadata) == len(theirs.fields) - 3
    assert len(file.tensors) == len(theirs.tensors)
    for other in theirs.tensors:
        info = file.tensors[other.name]
        assert info.shape == tuple(int(n) for n in other.shape[::-1])
        assert (info.type, info.offset) == (other.tensor_type.name, other.data_offset)
        assert info.nbytes == other.n_bytes
        assert file.array(other.name).tobytes() == other.data.tobytes()


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_key_is_used(tmp_path: Path, alignment: int):
    keys = {**METADATA, "general.alignment": alignment}
    file = GgufFile.open(write(tmp_path / "a.gguf", keys, TENSORS, alignment=alignment))
    np.testing.assert_array_equal(file.array("cube"), ROWS)
    assert file.array("blocks").tobytes() == TENSORS["blocks"].data


def test_version_2_and_trailing_bytes_are_accepted(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(encode_file(METADATA, TENSORS, version=2) + b"rest")
    np.testing.assert_array_equal(GgufFile.open(tmp_path / "a.gguf").array("cube"), ROWS)


def test_padding_after_the_last_tensor_may_be_absent(tmp_path: Path):
    data = encode_file({}, {"x": tensor(np.ones(3, np.float32))})
    (tmp_path / "a.gguf").write_bytes(data[:-20])
    assert GgufFile.open(tmp_path / "a.gguf").array("x").tolist() == [1, 1, 1]


def test_nested_lists(tmp_path: Path):
    inner = encode([1, 2])[4:]
    nested = struct.pack("<IIQ", 9, 9, 2) + inner + inner
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("deep") + nested
    (tmp_path / "a.gguf").write_bytes(data)
    assert GgufFile.open(tmp_path / "a.gguf").metadata["deep"] == [[1, 2], [1, 2]]


def test_unknown_tensor_name_gives_a_near_match(path: Path):
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path).array("cubes")
    assert "cubes" in caught.value.what
    assert "cube?" in caught.value.fix


def test_sha256_follows_the_content(path: Path):
    file = GgufFile.open(path)
    first = hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.sha256() == first == file.sha256()
    other = path.with_name("other.gguf")
    other.write_bytes(SOUND + b"!")
    assert GgufFile.open(other).sha256() == hashlib.sha256(SOUND + b"!").hexdigest()
    other.write_bytes(SOUND + b"?!")
    assert file.sha256() == first
    assert GgufFile.open(other).sha256() == hashlib.sha256(SOUND + b"?!").hexdigest()


# --- not a model at all ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"\r\n<!DOCTYPE html><title>Sign in</title>", "web page"),
        (b"<html>404</html>", "web page"),
        (b'{"error":"Repository not found"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS"),
        (struct.pack("<Q", 90) + b'{"__metadata__":{}}', "safetensors"),
        (b"PK\x03\x04rest", "zip"),
        (b"\x1f\x8b\x08", "compressed"),
        (b"lmgg" + bytes(60), "before GGUF"),
        (b"tjgg" + bytes(60), "before GGUF"),
        (b"FUGG" + bytes(60), "swapped"),
        (bytes(4096), "zeros"),
        (b"Hello, this is a text file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(40), "version 99"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, data: bytes, word: str):
    error = refused(tmp_path / "model.gguf", data)
    assert word in error.what
    assert not isinstance(error, TruncatedFileError)


def test_missing_file_names_near_matches(path: Path):
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path.with_name("smal.gguf"))
    assert "smal.gguf does not exist" in caught.value.what
    assert "did you mean small.gguf?" in caught.value.fix


def test_missing_file_lists_what_is_there_instead(path: Path):
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path.with_name("DeepSeek-V4-Flash-Q8.bin"))
    assert "small.gguf" in caught.value.fix
    with pytest.raises(ModelFileError, match="no folder"):
        GgufFile.open(path.parent / "nowhere" / "small.gguf")
    with pytest.raises(ModelFileError, match="does not exist"):
        GgufFile.open(path / "below-a-file.gguf")


@pytest.mark.parametrize("given", ["", "a\0b.gguf", "~nobody-of-this-name/x.gguf", "x" * 5000])
def test_impossible_paths(given: str):
    with pytest.raises(ModelFileError):
        GgufFile.open(given)


def test_folders(path: Path):
    assert GgufFile.open(path.parent).path == path
    empty = path.parent / "empty"
    empty.mkdir()
    with pytest.raises(ModelFileError, match=r"without a \.gguf file"):
        GgufFile.open(empty)
    write(path.with_name("second.gguf"), METADATA, TENSORS)
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path.parent)
    assert "2 models" in caught.value.what
    assert "second.gguf, small.gguf" in caught.value.fix


def test_a_folder_with_the_name_of_a_model(tmp_path: Path):
    (tmp_path / "model.gguf").mkdir()
    with pytest.raises(ModelFileError, match="without a"):
        GgufFile.open(tmp_path / "model.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile.open(tmp_path / "model.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_unreadable_file(path: Path):
    path.chmod(0)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile.open(path)


# --- truncated ------------------------------------------------------------------------------------


def test_every_shorter_file_is_truncated_and_says_so(tmp_path: Path):
    payload = TENSORS["blocks"].data
    end = SOUND.rindex(payload) + len(payload)
    for size in [*range(1, REACH + 40), *range(REACH + 40, end, 41), end - 1]:
        error = refused(tmp_path / "model.gguf", SOUND[:size])
        assert isinstance(error, TruncatedFileError), (size, error.what)
        assert f"found {size}" in error.what
    assert f"expected at least {end} bytes" in error.what
    (tmp_path / "model.gguf").write_bytes(SOUND[:end])
    GgufFile.open(tmp_path / "model.gguf")


def test_a_missing_tensor_is_not_called_truncated(golden_dir: Path, tmp_path: Path):
    data = (golden_dir / "tiny-f32.gguf").read_bytes()
    renamed = data.replace(b"blk.3.attn_norm.weight", b"blk.3.attn_mean.weight")
    (tmp_path / "renamed.gguf").write_bytes(renamed)
    file = GgufFile.open(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"missing: blk\.3\.attn_norm\.weight") as caught:
        load_trunk(file, ModelConfig.from_gguf(file))
    assert not isinstance(caught.value, TruncatedFileError)


# --- damaged headers ------------------------------------------------------------------------------


def header(tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


def entry(name: str, dims: list[int], kind: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(*entries: bytes, body: int = 4096) -> bytes:
    data = header(len(entries)) + b"".join(entries)
    return data + bytes(-len(data) % 32 + body)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (file_of(entry("x", [8], 0), entry("x", [8], 0, 32)), "tensor x is there twice"),
        (file_of(entry("x", [16], 0), entry("y", [8], 0, 32)), "x and y overlap"),
        (file_of(entry("x", [8], 0, 4)), "not a multiple of the alignment 32"),
        (file_of(entry("x", [8, 0], 0)), "dimension of 0"),
        (file_of(entry("x", [], 0)), "0 dimensions"),
        (file_of(entry("x", [1] * 5, 0)), "5 dimensions"),
        (file_of(entry("x", [8], 4)), "unknown type 4"),  # a type that was withdrawn
        (file_of(entry("x", [8], 1 << 31)), "unknown type"),
        (file_of(entry("x", [33], 8)), "row of 33 weights is not a multiple of the 32 of a Q8_0"),
        (file_of(string(b"\xff\xfe") + bytes(64)), "not UTF-8"),
        (header(0, 2) + (string("k") + encode(1)) * 2, "key 'k' is there twice"),
        (header(0, 1) + string("k") + struct.pack("<IQ", 99, 0) + bytes(9), "value type 99"),
        (header(0, 1) + string("k") + struct.pack("<IIQ", 9, 99, 1), "element type 99"),
        (header(0, 1) + string("k") + encode("x")[:4] + string(b"\x80"), "not UTF-8"),
        (header(0, 1) + string("k") + struct.pack("<IIQ", 9, 8, 2) + string(b"a") + string(b"\x80"),
         "k[1] is not UTF-8"),
        (header(0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 9,
         "to a depth that no model has"),
    ],
)  # fmt: skip
def test_damaged_headers_name_the_place(tmp_path: Path, data: bytes, word: str):
    error = refused(tmp_path / "model.gguf", data)
    assert word in error.what
    assert "at byte" in error.what
    assert not isinstance(error, TruncatedFileError)


@pytest.mark.parametrize("alignment", [0, 1, 4, 24, -32, "x", True, As("FLOAT32", 32.0)])
def test_impossible_alignments(tmp_path: Path, alignment: object):
    data = encode_file({"general.alignment": alignment}, {})
    assert "general.alignment" in refused(tmp_path / "model.gguf", data).what


HUGE = [1 << 20, 1 << 24, 1 << 33, 1 << 62, (1 << 64) - 1]


@pytest.mark.parametrize("huge", HUGE)
def test_huge_lengths_cost_nothing(tmp_path: Path, huge: int):
    """Lengths far beyond the file, in every field that has one."""
    text = string("k") + struct.pack("<I", 8)
    cases = [
        header(huge, 0),
        header(0, huge),
        header(0, 1) + struct.pack("<Q", huge),
        header(0, 1) + text + struct.pack("<Q", huge),
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 8, huge),
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 9, huge),
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 0, huge),
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 12, huge),
        header(0, 1) + string("k") + struct.pack("<IIQQ", 9, 8, 1, huge),
        file_of(struct.pack("<Q", huge)),
        file_of(entry("x", [huge], 0)),
        file_of(entry("x", [huge] * 4, 0)),
        file_of(entry("x", [1], 0, huge // 32 * 32)),
    ]
    tracemalloc.start()
    try:
        for data in cases:
            refused(tmp_path / "model.gguf", data + bytes(1000))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_huge_lengths_inside_a_huge_file(tmp_path: Path):
    """A length that does fit into the file is refused when no model has such a one."""
    path = tmp_path / "model.gguf"
    starts = [
        header(0, 1) + string("k") + struct.pack("<IQ", 8, 1 << 29),
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 0, 1 << 29),
        header(0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1 << 26),
        header(0, 1 << 24),
        header(1 << 24, 0),
        header(0, 1) + struct.pack("<Q", 1 << 20),
    ]
    tracemalloc.start()
    try:
        for start in starts:
            path.write_bytes(start)
            os.truncate(path, 1 << 34)  # sparse: no disk is used
            with pytest.raises(ModelFileError) as caught:
                GgufFile.open(path)
            assert not isinstance(caught.value, TruncatedFileError)
            assert "more than any model" in caught.value.what
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
        path.unlink()


def test_many_lists_share_one_budget(tmp_path: Path):
    size = 3 << 19
    entries = [string(f"k{i}") + struct.pack("<IIQ", 9, 0, size) + bytes(size) for i in range(2)]
    error = refused(tmp_path / "model.gguf", header(0, 2) + b"".join(entries))
    assert f"length of k1 is {size}, more than any model has" in error.what


# --- split models ---------------------------------------------------------------------------------


def test_any_shard_or_the_folder_opens_the_whole_model(tmp_path: Path):
    paths = split(tmp_path, "model", METADATA, TENSORS, 3)
    for asked in [*paths, tmp_path]:
        file = GgufFile.open(asked)
        assert file.shards == tuple(paths)
        assert file.path == paths[0]
        assert file.size == sum(p.stat().st_size for p in paths)
        assert file.metadata["a.text"] == "Grüße"
        assert set(file.tensors) == set(TENSORS)
        for name, raw in TENSORS.items():
            assert file.array(name).tobytes() == raw.data
    joined = b"".join(p.read_bytes() for p in paths)
    assert file.sha256() == hashlib.sha256(joined).hexdigest()


@pytest.mark.parametrize("gone", [(2,), (1,), (1, 3)])
def test_missing_shards_are_listed_by_name(tmp_path: Path, gone: tuple[int, ...]):
    paths = split(tmp_path, "model", METADATA, TENSORS, 3)
    left = next(p for i, p in enumerate(paths, 1) if i not in gone)
    for number in gone:
        paths[number - 1].unlink()
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(left)
    for number, shard in enumerate(paths, 1):
        assert (f" {shard.name}" in caught.value.what) == (number in gone)
    assert not isinstance(caught.value, TruncatedFileError)


@pytest.mark.parametrize("name", ["m-00001-of-00001.gguf", "best-of-breed.gguf", "a-of-00002.gguf"])
@pytest.mark.parametrize("count", [None, 0, 1])
def test_normal_files_with_telling_names(tmp_path: Path, name: str, count: int | None):
    keys = METADATA if count is None else {**METADATA, "split.count": As("UINT16", count)}
    file = GgufFile.open(write(tmp_path / name, keys, TENSORS))
    assert file.shards == (tmp_path / name,)
    assert set(file.tensors) == set(TENSORS)


def test_a_renamed_shard_is_recognised(tmp_path: Path):
    paths = split(tmp_path, "model", METADATA, TENSORS, 3)
    renamed = paths[1].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"one of 3 shards \(split\.count\)"):
        GgufFile.open(renamed)


def test_exchanged_shards_are_recognised(tmp_path: Path):
    paths = split(tmp_path, "model", METADATA, TENSORS, 3)
    spare = paths[1].rename(tmp_path / "spare")
    paths[2].rename(paths[1])
    spare.rename(paths[2])
    with pytest.raises(ModelFileError, match="says that it is shard 3"):
        GgufFile.open(paths[0])


def test_shards_of_two_models_are_recognised(tmp_path: Path):
    paths = split(tmp_path / "a", "model", METADATA, TENSORS, 3)
    fewer = {name: TENSORS[name] for name in ("cube", "half")}
    others = split(tmp_path / "b", "model", METADATA, fewer, 3)
    paths[2].write_bytes(others[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count is 5"):
        GgufFile.open(paths[0])
    keys = {"split.no": 2, "split.count": 3}
    write(paths[2], keys, {name: TENSORS[name] for name in ("half", "cube")})
    with pytest.raises(ModelFileError, match="is already in model-00002-of-00003"):
        GgufFile.open(paths[0])


def test_a_truncated_shard_is_named(tmp_path: Path):
    paths = split(tmp_path, "model", METADATA, TENSORS, 3)
    paths[2].write_bytes(paths[2].read_bytes()[:-64])
    with pytest.raises(TruncatedFileError, match="model-00003-of-00003"):
        GgufFile.open(paths[0])


# --- fuzzing --------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 7, 8, 9, 12, 13, 31, 33, 255, 65536, (1 << 32) - 1, *HUGE]),
    st.integers(0, (1 << 64) - 1),
)
PLACES = st.integers(0, 1 << 20)
MUTATION = st.one_of(
    st.tuples(st.just("bytes"), PLACES, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("u32"), PLACES, NUMBERS),
    st.tuples(st.just("u64"), PLACES, NUMBERS),
    st.tuples(st.just("add"), PLACES, st.sampled_from([-32, -8, -1, 1, 2, 8, 32, 128])),
    st.tuples(st.just("cut"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("end"), PLACES, st.just(0)),
)


def mutate(data: bytes, reach: int, changes: list[tuple]) -> bytes:
    """Apply changes to the first `reach` bytes, past magic and version."""
    out = bytearray(data)
    for kind, place, value in changes:
        at = 8 + place % (reach - 8)
        if kind == "bytes":
            out[at : at + len(value)] = value
        elif kind == "u32":
            out[at : at + 4] = struct.pack("<I", value & 0xFFFFFFFF)
        elif kind == "u64":
            out[at : at + 8] = struct.pack("<Q", value)
        elif kind == "add":
            out[at : at + 1] = bytes([(out[at] + value) % 256 if at < len(out) else 0])
        elif kind == "cut":
            del out[at : at + value]
        elif kind == "insert":
            out[at:at] = value
        else:
            del out[max(1, place % len(out)) :]
    return bytes(out)


def use(path: Path) -> None:
    """Open a file and do with it all that a run does; only errors for the user may come out."""
    try:
        file = GgufFile.open(path)
    except ModelFileError:
        return
    for name, info in file.tensors.items():
        assert file.array(name).nbytes == info.nbytes
        data = from_gguf(file, name)
        assert data.nbytes == info.nbytes
        if can_decode(info.type):
            assert data.float().shape == info.shape
    try:
        config = ModelConfig.from_gguf(file)
        load_trunk(file, config)
        if find_mtp_layout(file):
            load_mtp(file, config, file)
    except Ds4FlowError:
        pass


def fuzz(path: Path, data: bytes, reach: int, changes: list[tuple]) -> None:
    path.write_bytes(mutate(data, reach, changes))
    tracemalloc.start()
    try:
        use(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def common(count: int) -> settings:
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


REACH = len(SOUND) - sum(len(raw.data) for raw in TENSORS.values())


@common(300)
@given(changes=st.lists(MUTATION, min_size=1, max_size=4))
def test_fuzzed_small_files(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple]):
    fuzz(tmp_path_factory.getbasetemp() / "fuzz.gguf", SOUND, REACH, changes)


@common(100)
@given(changes=st.lists(MUTATION, min_size=1, max_size=2))
def test_fuzzed_model_headers(tmp_path_factory, golden_dir: Path, changes: list[tuple]):
    data = (golden_dir / "tiny-f32.mtp-support.gguf").read_bytes()
    fuzz(tmp_path_factory.getbasetemp() / "fuzz.gguf", data, 2080, changes)


@pytest.mark.slow
@common(3000)
@given(changes=st.lists(MUTATION, min_size=1, max_size=6))
def test_fuzzed_small_files_at_length(tmp_path_factory, changes: list[tuple]):
    fuzz(tmp_path_factory.getbasetemp() / "fuzz.gguf", SOUND, REACH, changes)


@pytest.mark.slow
@common(2000)
@given(changes=st.lists(MUTATION, min_size=1, max_size=3))
def test_fuzzed_model_headers_at_length(tmp_path_factory, golden_dir: Path, changes: list[tuple]):
    data = (golden_dir / "tiny-q4k.llama-mtp.gguf").read_bytes()
    fuzz(tmp_path_factory.getbasetemp() / "fuzz.gguf", data, 10048, changes)
