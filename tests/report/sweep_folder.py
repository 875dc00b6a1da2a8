"""Sweep directories with known numbers, as `ds4flow run -m` leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def make(
    folder: Path, jobs: list[dict[str, str]], endings: dict[int, tuple[str, str]] | None = None
) -> Path:
    """A sweep directory as `ds4flow run -m` leaves it; speed is 100 * (draft + 1) / margin.

    `endings` are status and reason of jobs that are not done; one of status missing left nothing.
    """
    folder.mkdir(parents=True)
    rows, planned = [], []
    for number, values in enumerate(jobs):
        words = [f"{key}={value}" for key, value in values.items()]
        planned.append({"number": number, "overrides": words})
        status, reason = (endings or {}).get(number, ("done", None))
        if status == "missing":
            continue
        rows.append(
            {
                "number": number,
                "attempt": 1,
                "overrides": words,
                "directory": str(number),
                "status": status,
                "reason": reason,
            }
        )
        draft, margin = int(values.get("mtp.draft", 1)), float(values.get("mtp.margin", 1.0))
        exact = draft == 0 or margin == 1.0
        run = folder / str(number)
        run.mkdir()
        config = {key: {"value": json.loads(v), "source": "cli"} for key, v in values.items()}
        config["mtp.gate"] = {"value": 0.5, "source": "env DS4_MTP_GATE"}
        facts = {
            "status": "complete" if status == "done" else "failed",
            "identity": "exact" if exact else "relaxed",
            "config": config,
            "host": "here",
        }
        write_json(run / "run.json", facts)
        if status == "done":
            summary = {
                "tokens_per_second": 100.0 * (draft + 1) / margin,
                "draft_acceptance_rate": 0.5 if draft else None,
                "mean_acceptance_length": 1.0 + draft / 2,
                "output_tokens": 200,
                "cycles": 100,
                "relaxed_accepts": 0 if exact else 7,
            }
            write_json(run / "summary.json", summary)
    facts = {
        "status": "complete",
        "keys": list(jobs[0]),
        "overrides": ["mtp.draft=0,1,2", "name=</script>"],
        "jobs": planned,
        "machine": {"processor": "abacus"},
    }
    write_json(folder / "sweep.json", facts)
    (folder / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


GRID = [{"mtp.draft": d, "mtp.margin": m} for d in ("0", "1", "2") for m in ("1.0", "0.5")]
ENDINGS = {3: ("failed", "Ds4FlowError: </script> no room"), 5: ("missing", "")}
