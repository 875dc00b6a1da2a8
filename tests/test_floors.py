"""Imports go down only, and the environment is read in one place."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = (
    {"errors", "memory", "rundir", "origin", "metrics", "packaged", "runs"},
    {
        "model",
        "kernels",
        "device",
        "parallel",
        "gguf",
        "gguf_header",
        "model_files",
        "quants",
        "ranks",
        "tokenizer",
        "text_stream",
        "chat",
        "conversation",
    },
    {
        "speculate",
        "sampling",
        "depth",
        "pace",
        "oracle",
        "stale",
        "diagnosis",
        "cache",
        "graph",
        "kept",
    },
    {"pipeline", "trace"},
    {"stages"},
    {
        "schema",
        "checks",
        "objective",
        "plugins",
        "env",
        "overrides",
        "quoting",
        "explain",
        "config",
        "provenance",
        "wiring",
        "prompt_set",
    },
    {
        "cli",
        "completion",
        "flags",
        "preload",
        "followers",
        "execute",
        "replay",
        "replay_plan",
        "whatif",
        "recorded",
        "prompt_run",
        "prompt_summary",
        "report",
        "sweeps",
        "ab",
        "__main__",
    },
)
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
# Floor 5 composes configs and floor 6 takes commands; torch may not be waited for before a run.
WITHOUT_TORCH = ("ds4flow.cli", "ds4flow.config", "ds4flow.execute", "ds4flow.pipeline")


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in (("ds4flow", "ds4flow"), ("stages", "ds4flow.stages")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)), path


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a file imports at any depth, and whether only for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "ds4flow":
                yield name, id(node) in typing_only


def floor(module: str) -> int | None:
    parts = module.split(".")
    return LEVEL.get(parts[1]) if len(parts) > 1 else None


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: str(value)[-40:])
def test_imports_go_down(module: str, path: Path) -> None:
    own = floor(module)
    for name, typing_only in imports(path):
        other = floor(name)
        if own is None or other is None or typing_only:
            continue
        assert other <= own, f"{module} imports {name} from a higher floor"
        if own == LEVEL["stages"]:
            assert other != own, f"{module} imports another stage, {name}"
        else:
            assert other != LEVEL["stages"], f"{module} imports {name}; stages come in by YAML"


def test_only_env_reads_the_environment() -> None:
    for module, path in modules():
        if module != "ds4flow.env":
            text = path.read_text(encoding="utf-8")
            assert "os.environ" not in text, module
            assert "getenv" not in text, module


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_no_torch_before_a_run_starts(module: str) -> None:
    import subprocess
    import sys

    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "ds4flow").rglob("__init__.py")
    }
    assert set(listed) == there | {"ds4flow.stages", "ds4flow.conf"}
