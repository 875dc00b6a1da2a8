"""The `ds4flow` command in this process."""

from __future__ import annotations

from collections.abc import Mapping

from click.testing import CliRunner, Result

from ds4flow.cli import main


def ds4flow(
    *words: str, code: int | None = None, answer: str | None = None, env: Mapping[str, str] = {}
) -> Result:
    """Run it with `answer` on stdin; `code` is the exit code that it must have.

    What it does not report itself is a bug, and is raised.
    """
    result = CliRunner().invoke(main, words, input=answer, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if code is not None:
        assert result.exit_code == code, result.stderr
    return result
