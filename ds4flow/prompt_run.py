"""What a composed config asks for, done in a run directory: one prompt, or a set in one load.

Every prompt of a set runs as a run of its own would, in a directory of its own, with new stages, a
new cache and only files, tokenizer and model shared. So neither its text nor any count depends on
its place in the set, but for mtp.draft=auto: it knows from earlier prompts what passes cost, and
records what it begins with. A prompt that fails is recorded, and the others go on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ds4flow import prompt_set, prompt_summary
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.pipeline import State
from ds4flow.prompt_set import Prompt, PromptSet
from ds4flow.prompt_summary import Outcome, SetResult
from ds4flow.quoting import uninterpolated
from ds4flow.recorded import STOPS, recorded
from ds4flow.rundir import RunDir
from ds4flow.runs.record import RECORD, Run
from ds4flow.wiring import Wiring, build_pipeline, read_prompt

_log = logging.getLogger("ds4flow")

SOURCE = "prompt set"
"""Origin of values that a set gave to one of its prompts."""

_CARRIED = ("command", "identity", "versions", "machine", "choices", "config")  # by every prompt
_OWN = ("prompt_id", "prompt_category", "prompt_line", "seed", "finish_reason")  # of one prompt


def load(config: DictConfig, run: RunDir) -> State:
    """Open the files and load the model that `config` names, for any number of prompts."""
    shared = State(run=run, prompt="")
    build_pipeline(config).share(shared)
    return shared


def read_set(config: DictConfig) -> PromptSet | None:
    """The set that the config names, checked; None when it names none."""
    if config.prompts is None:
        return None
    if config.prompt_file is not None:
        raise UsageError("prompt_file and prompts are both given", "set one of them to null")
    return prompt_set.read(str(config.prompts), mode=str(config.model.chat))


def perform(config: DictConfig, run: RunDir, shared: State | None = None) -> None:
    """Run the prompt or the set of prompts of a checked config.

    `shared` is what `load` made for an equal config; without it everything is loaded here. Raises
    Ds4FlowError when a prompt failed, after the others have run.
    """
    prompts = read_set(config)
    if prompts is not None:
        run.write("prompts.jsonl", prompts.data)
        run.record(**prompts.facts)
        _SetRun(config, run, prompts, shared or load(config, run)).perform()
        return
    text = read_prompt(config)
    run.write("prompt.txt", text)
    pipeline = build_pipeline(config)
    pipeline.run(State(run=run, prompt=text) if shared is None else shared.share_with(run, text))


class _SetRun:
    """A set being run: what its prompts share, and what became of those that have run."""

    def __init__(self, config: DictConfig, run: RunDir, prompts: PromptSet, shared: State) -> None:
        self.config, self.run, self.prompts, self.shared = config, run, prompts, shared
        self.talks = bool(OmegaConf.select(config, "log.table", default=True))
        self.streams = bool(OmegaConf.select(config, "log.stream", default=False))
        self.outcomes: list[Outcome] = []
        self._wirings: dict[tuple[Any, ...], Wiring] = {}

    def perform(self) -> None:
        """Run every prompt; Ds4FlowError in the end when one failed."""
        try:
            for index, prompt in enumerate(self.prompts.prompts):
                self._show_and_perform(index, prompt)
        finally:
            self._finish()
        failed = [one for one in self.outcomes if one.status == "failed"]
        if failed:
            others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            reason = (failed[0].error or "").partition("\n")[0]
            raise Ds4FlowError(
                f"{len(failed)} of {len(self.outcomes)} prompts failed: "
                f"{failed[0].prompt.id}{others}: {reason}",
                "the others are complete; summary.json names every prompt and how it ended",
            )

    def _show_and_perform(self, index: int, prompt: Prompt) -> None:
        place = f"prompt {index + 1}/{len(self.prompts.prompts)}"
        if self.talks:
            _say(f"{place}: {prompt.id} ({prompt.category})")
        try:
            self._perform_one(index, prompt)
        finally:
            path = self.run.path / prompt.folder(index)
            begun = (path / RECORD).is_file()
            self.outcomes.append(Outcome(index, prompt, Run.open(path) if begun else None))
            if self.talks or self.outcomes[-1].status == "failed":
                _say(f"{place}: {prompt_summary.line(self.outcomes[-1])}")

    def _perform_one(self, index: int, prompt: Prompt) -> None:
        """Run one prompt in its own directory; only what stops the whole set is raised."""
        changes = _changes(self.config, prompt)
        facts = {name: self.run.facts[name] for name in _CARRIED if name in self.run.facts}
        facts["config"] = _config_facts(facts.get("config", {}), prompt, changes)
        facts |= {
            "prompt_id": prompt.id,
            "prompt_category": prompt.category,
            "prompt_line": prompt.line,
            "seed": changes.get("sampling.seed"),
        }
        child = RunDir.create(self.run.path / prompt.folder(index), facts)
        _log.info("prompt %s in %s", prompt.id, child.path.name)
        state = self.shared.share_with(child, prompt.text, prompt.messages)
        try:
            with recorded(child):
                child.write("prompt.txt", prompt.written)
                self._wiring(changes).build().run(state)
        except STOPS:
            raise
        except Exception:
            pass  # recorded, with its traceback in run.log where it is not the user's doing
        finally:
            # Texts follow each other on stdout: the next one begins on a line of its own.
            if self.streams and state.text and not state.text.endswith("\n"):
                print(flush=True)

    def _wiring(self, changes: Mapping[str, Any]) -> Wiring:
        """The stages of the config with a prompt's own values; resolved once for all with equal."""
        key = tuple(changes.items())
        if key not in self._wirings:
            config = self.config.copy()
            for name, value in {**changes, "log.table": False}.items():
                if OmegaConf.select(config, name) is not None:
                    text = uninterpolated(value) if isinstance(value, str) else value
                    OmegaConf.update(config, name, text)
            self._wirings[key] = Wiring.of(config)
        return self._wirings[key]

    def _finish(self) -> None:
        """Record what there is, also of a set that was stopped."""
        missing = range(len(self.outcomes), len(self.prompts.prompts))
        self.outcomes += [Outcome(index, self.prompts.prompts[index], None) for index in missing]
        result = prompt_summary.collect(self.outcomes)
        self.run.release_reserve()
        self.run.record(**_common(result, self.run.facts))
        if result.total.prompts:
            self.run.record(identity=result.total.identity)
        self.run.write_json("summary.json", result.summary())
        if self.talks:
            _show(result, self.run)


def _changes(config: DictConfig, prompt: Prompt) -> dict[str, Any]:
    """The keys that are this prompt's own."""
    changes: dict[str, Any] = {}
    if prompt.max_tokens is not None:
        changes["commit.max_tokens"] = prompt.max_tokens
    if prompt.system is not None:
        changes["system"] = prompt.system
    if config.sampling.temperature > 0.0:
        changes["sampling.seed"] = prompt.seed(config.sampling.seed)
    return changes


def _config_facts(
    config: Mapping[str, Any], prompt: Prompt, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a config with which a single run does what this prompt did."""
    own = {"prompts": None, "prompt": prompt.text, **changes}
    return {**config, **{key: {"value": value, "source": SOURCE} for key, value in own.items()}}


def _common(result: SetResult, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the stages recorded alike for every prompt: files, kernels, chat and the like."""
    facts = [dict(one.run.facts) for one in result.outcomes if one.run is not None]
    first = facts[0] if facts else {}
    return {
        key: value
        for key, value in first.items()
        if key not in known and key not in _OWN and all(key in f and f[key] == value for f in facts)
    }


def _show(result: SetResult, run: RunDir) -> None:
    from rich.console import Console

    for warning in result.warnings():
        _say(f"note: {warning}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(prompt_summary.table(result))
    _say(f"run directory {os.path.relpath(run.path)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
