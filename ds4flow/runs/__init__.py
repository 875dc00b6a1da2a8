"""Reading what runs left behind: records, search, comparison. Nothing here starts a run."""

from pathlib import Path

ROOT = Path("runs")
"""Where runs lie unless hydra.run.dir says otherwise."""
