"""The report of one examined DeepSeek-V4 file: verdict, memory and traffic.

Promise: nothing is decided here; a file is fine exactly if its examination noted no problem.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from ds4flow.doctor.accounting import cache_size, traffic, trunk_bytes
from ds4flow.doctor.examine import census, text_of
from ds4flow.doctor.report import FileReport, Fit, Memory, Problem, Split, Vocabulary
from ds4flow.doctor.subject import Subject


def report_of(
    subject: Subject, subjects: list[Subject], context: int, bandwidth_gbs: float | None
) -> FileReport:
    file = subject.file
    if subject.role == "dspark":
        subject.problems.append(
            Problem(
                f"{file.path} holds a DSpark drafter (tensor {subject.drafter.dspark}) and no main "
                "model; that drafter is not covered",
                "give the main model, with the MTP block of the first release to draft",
            )
        )
    report = FileReport(
        path=str(file.path),
        role=subject.role,
        ok=not subject.problems,
        verdict="",
        problems=tuple(subject.problems),
        notes=tuple(subject.notes),
        size=file.size,
        split=Split(len(file.shards), ()) if len(file.shards) > 1 else None,
        architecture=text_of(file, "general.architecture"),
        name=text_of(file, "general.name"),
        census=census(file.tensors),
        dimensions=_dimensions(subject),
        vocabulary=_vocabulary(subject),
        drafter=subject.drafter,
        fits=tuple(subject.fits),
    )
    if subject.role != "main" or subject.config is None:
        return replace(report, verdict=_verdict(subject, None))
    block, fit = _block_of(subject, subjects)
    report = replace(
        report,
        verdict=_verdict(subject, block),
        cache=(cache := cache_size(subject.config, context)),
    )
    if not subject.whole:
        return report
    weights = trunk_bytes(file.tensors, subject.config)
    mtp = (fit.weight_bytes if fit is not None else None) or 0
    return replace(
        report,
        memory=Memory(weights, mtp, cache.bytes, weights + mtp + cache.bytes),
        traffic=traffic(
            file.tensors,
            subject.config,
            context,
            fit.draft_bytes if fit is not None else None,
            bandwidth_gbs,
        ),
    )


def _block_of(main: Subject, subjects: list[Subject]) -> tuple[Subject | None, Fit | None]:
    """The MTP block that this main file would draft with: a file that fits it, else its own."""
    for subject in sorted(subjects, key=lambda subject: subject is main):
        for fit in subject.fits:
            if fit.ok and fit.main == str(main.file.path):
                return subject, fit
    return None, None


def _verdict(subject: Subject, block: Subject | None) -> str:
    count = len(subject.problems)
    if count:
        return f"does not run: {count} reason{'s' if count > 1 else ''}"
    if subject.role == "mtp":
        return f"fits {', '.join(fit.main for fit in subject.fits if fit.ok)}"
    if block is None:
        return "runs without drafts: no MTP block was given"
    return f"runs, drafts with {'its own MTP block' if block is subject else block.file.path}"


def _dimensions(subject: Subject) -> dict[str, object] | None:
    """The configuration, or the little that an MTP support file's shapes tell."""
    if subject.config is not None:
        return asdict(subject.config)
    tensors = subject.file.tensors
    shapes = {"dim": ("mtp.0.enorm.weight", -1), "experts": ("mtp.0.ffn_gate_inp.weight", 0)}
    found: dict[str, object] = {
        name: tensors[tensor].shape[axis]
        for name, (tensor, axis) in shapes.items()
        if tensor in tensors
    }
    return found or None


def _vocabulary(subject: Subject) -> Vocabulary | None:
    if subject.tokenizer is not None:
        return Vocabulary(subject.tokenizer.vocab_size, subject.tokenizer.digest)
    tokens = subject.file.metadata.get("tokenizer.ggml.tokens")
    return Vocabulary(len(tokens), None) if isinstance(tokens, list) else None
