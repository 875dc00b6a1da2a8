"""Memory limits from a machine made of files, and refusals with sizes and the key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4flow.config import compose
from ds4flow.errors import Ds4FlowError
from ds4flow.memory import GIB, available_bytes, check_memory, size
from ds4flow.pipeline import State
from ds4flow.rundir import RunDir
from ds4flow.wiring import build_pipeline


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       32000000 kB\nMemFree:  100 kB\nMemAvailable:   16000000 kB\n"


def test_the_machines_own_limit(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {"proc/meminfo": MEMINFO})) == 16000000 * 1024


def test_a_control_group_is_stricter(tmp_path: Path) -> None:
    """Version 2: the limit may be set on a group above; file pages that are cold can go."""
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": str(4 * GIB),
        "sys/fs/cgroup/a/memory.current": str(3 * GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
    }
    assert available_bytes(machine(tmp_path, files)) == GIB + GIB // 2


def test_a_container_sees_its_limit_at_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/docker/not-visible-here\n",
        "sys/fs/cgroup/memory.max": str(2 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
    }
    assert available_bytes(machine(tmp_path, files)) == GIB


def test_version_one(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {GIB}\n",
    }
    assert available_bytes(machine(tmp_path, files)) == 2 * GIB


def test_nothing_known_refuses_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    check_memory(weights=1 << 60, cache=1 << 60, context=10, per_token=1.0, available=None)


def test_this_machine_has_some() -> None:
    available = available_bytes()
    assert available is None or available > 1 << 20


def test_a_cache_that_does_not_fit_names_the_key_and_what_would() -> None:
    with pytest.raises(Ds4FlowError) as caught:
        check_memory(
            weights=GIB, cache=2 * GIB, context=4096, per_token=2 * GIB / 4096, available=2 * GIB
        )
    assert caught.value.what == (
        "the weights (1.0 GiB) and a cache for runtime.context=4096 (2.0 GiB) exceed the 2.0 GiB "
        "of memory that are available"
    )
    assert "lower runtime.context (about 1945 tokens would fit)" in caught.value.fix


def test_weights_that_do_not_fit_are_no_matter_of_context() -> None:
    with pytest.raises(Ds4FlowError) as caught:
        check_memory(
            weights=3 * GIB, cache=GIB, context=4096, per_token=GIB / 4096, available=2 * GIB
        )
    assert "smaller quantisation" in caught.value.fix
    assert "runtime.memory" in caught.value.fix
    assert size(5 << 20) == "5.0 MiB"


def test_a_long_context_of_the_demo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was made for less, which is said; the cache has the rows, and positions go on."""
    config = compose(
        ["runtime.context=32768", "runtime.kernels=reference", "commit.max_tokens=2", "log=quiet"]
    )
    pipeline = build_pipeline(config)
    state = State(run=RunDir.create(tmp_path / "run"), prompt="import os\n")
    pipeline.run(state)
    assert len(state.output) == 2
    assert state.cache.context == 32768
    assert "exceeds the 2048 tokens that the model was made for" in capsys.readouterr().err
    for layer in state.cache.layers:
        for rows in (layer.compressed, layer.index):
            if rows is not None:
                assert rows.pool.shape[0] == 32768 // rows.ratio
    state.cache.length = 32768 - 1  # as if the text had come so far
    state.model.logits(state.model.forward([5], state.cache))
    state.cache.commit(1)
    with pytest.raises(Ds4FlowError, match="exceeds the context of 32768"):
        state.model.forward([5], state.cache)
