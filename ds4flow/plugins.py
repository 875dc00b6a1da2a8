"""Hydra's plugins that are not part of it: which extra brings which."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec

from ds4flow.errors import Ds4FlowError

EXTRAS: Mapping[str, str] = {
    "hydra_plugins.hydra_joblib_launcher": "joblib",
    "hydra_plugins.hydra_submitit_launcher": "slurm",
    "hydra_plugins.hydra_ray_launcher": "ray",
    "hydra_plugins.hydra_optuna_sweeper": "optuna",
}
"""Package of a plugin to the extra of ds4flow that installs it."""

_OPTIONS: Mapping[str, str] = {
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "slurm",
    "hydra/launcher/submitit_slurm": "slurm",
    "hydra/launcher/ray": "ray",
    "hydra/launcher/ray_aws": "ray",
    "hydra/sweeper/optuna": "optuna",
}
"""Options that the plugins bring themselves."""


def missing_for_option(name: str) -> Ds4FlowError | None:
    """The error for an option of a plugin that is not there, `hydra/launcher/ray` for instance."""
    extra = _OPTIONS.get(name)
    return None if extra is None else _missing(name.rpartition("/"), extra)


def refuse_missing(group: str, option: str, target: str) -> None:
    """Raise Ds4FlowError when the class `target`, which GROUP=OPTION chose, is not installed."""
    package = next((name for name in EXTRAS if target.startswith(f"{name}.")), None)
    if package is not None and not _is_installed(package):
        raise _missing((group, "/", option), EXTRAS[package])


def _missing(option: tuple[str, str, str], extra: str) -> Ds4FlowError:
    return Ds4FlowError(
        f"{option[0]}={option[2]} needs a package that is not installed",
        f"pip install 'ds4flow[{extra}]'",
    )


def _is_installed(package: str) -> bool:
    with suppress(ImportError):
        return find_spec(package) is not None
    return False
