"""Runs of the demo model from Python: loaded once, a directory each, records as real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ds4flow.config import compose
from ds4flow.pipeline import State
from ds4flow.prompt_run import load, perform
from ds4flow.rundir import RunDir
from ds4flow.runs.record import Run


class Demo:
    """The demo model, loaded once; every run has its own directory in `folder`."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder, self.number = folder, 0
        self.base = _with(compose(["log=quiet"]), keys)
        self.shared: State | None = None

    def run(self, **keys: Any) -> Run:
        """Run with these keys, written `mtp__draft=2`, beside those of the constructor."""
        config = _with(self.base, keys)
        whole: Any = OmegaConf.to_container(config, resolve=True)
        recorded = {
            f"{group}.{key}": {"value": value, "source": "cli"}
            for group in ("mtp", "commit")
            for key, value in whole[group].items()
        }
        self.number += 1
        facts = {"choices": {"draft": "mtp"}, "config": recorded}
        run = RunDir.create(self.folder / f"{self.number:04d}", facts)
        if self.shared is None:
            self.shared = load(_with(self.base, {"mtp__draft": 1}), run)
        perform(config, run, self.shared)
        run.finish("complete")
        return Run.open(run.path)


def _with(config: DictConfig, keys: dict[str, Any]) -> DictConfig:
    changed = config.copy()
    for key, value in keys.items():
        OmegaConf.update(changed, key.replace("__", "."), value)
    return changed
