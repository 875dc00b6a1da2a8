"""DeepSeek-V4 files together: main models, MTP blocks, and which block belongs to which model.

Promise: a file gets the verdict that loading it would give, with all the reasons, and for the same
checks: nothing here repeats the loader's rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar, cast

from ds4flow.doctor.accounting import (
    cache_size,
    draft_bytes,
    mtp_tensors,
    own_bytes,
    traffic,
    trunk_bytes,
)
from ds4flow.doctor.examine import census, text_of
from ds4flow.doctor.report import (
    Drafter,
    FileReport,
    Fit,
    Layout,
    Memory,
    Problem,
    Role,
    Split,
    Vocabulary,
)
from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ARCHITECTURE, SUPPORT_ARCHITECTURE, ModelConfig
from ds4flow.model.slots import check_trunk
from ds4flow.model.weights import find_mtp_layout, load_mtp
from ds4flow.tokenizer import Tokenizer

DSPARK = re.compile(r"mtp\.0\.main_proj\.|mtp\.[12]\.|dspark\.|.*markov_head")
GIVE_BOTH = "give the main file as well: ds4flow inspect MAIN.gguf MTP.gguf"

T = TypeVar("T")


@dataclass
class _Subject:
    """One file while it is being examined."""

    file: GgufFile
    role: Role
    drafter: Drafter
    config: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    whole: bool = False  # every tensor of the trunk is there
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """The result of `action`, or None after noting why it failed."""
        try:
            return action()
        except ModelFileError as error:
            self.problems.append(Problem(error.what, error.fix))
            return None


def examine_models(
    files: list[GgufFile], context: int, bandwidth_gbs: float | None
) -> list[FileReport]:
    """One report per file, in order; MTP files are compared with every main file among them."""
    subjects = [_subject(file) for file in files]
    mains = [subject for subject in subjects if subject.role == "main"]
    for main in mains:
        _examine_main(main, context)
    for subject in subjects:
        if subject.role == "mtp":
            _examine_block(subject, mains)
    return [_report(subject, subjects, context, bandwidth_gbs) for subject in subjects]


# --- what a file is ------------------------------------------------------------------------------


def _subject(file: GgufFile) -> _Subject:
    sign = next((name for name in file.tensors if DSPARK.match(name)), None)
    layout = cast("Layout | None", find_mtp_layout(file))
    drafter = Drafter(_claimed(file), layout, sign, None)
    return _Subject(file, _role(file, drafter), drafter)


def _claimed(file: GgufFile) -> int:
    """Number of MTP layers that the metadata speak of."""
    values = [
        file.metadata.get(f"{ARCHITECTURE}.{key}")
        for key in ("nextn_predict_layers", "mtp_layer_count")
    ]
    return max((v for v in values if isinstance(v, int)), default=0)


def _trunk_blocks(file: GgufFile) -> int:
    """Number of blocks that are not MTP blocks."""
    numbers = {int(m[1]) for name in file.tensors if (m := re.match(r"blk\.(\d{1,6})\.", name))}
    return sum(f"blk.{n}.nextn.eh_proj.weight" not in file.tensors for n in numbers)


def _role(file: GgufFile, drafter: Drafter) -> Role:
    if _trunk_blocks(file):
        return "main"
    if drafter.layout is not None:
        return "mtp"
    if drafter.dspark is not None:
        return "dspark"
    support = file.metadata.get("general.architecture") == SUPPORT_ARCHITECTURE
    return "mtp" if support else "main"


# --- main files ----------------------------------------------------------------------------------


def _examine_main(main: _Subject, context: int) -> None:
    file = main.file
    main.config = main.attempt(lambda: ModelConfig.from_gguf(file))
    main.tokenizer = main.attempt(lambda: Tokenizer.from_metadata(file.metadata))
    if main.drafter.layout is None:
        _explain_missing_block(main)
    config = main.config
    if config is None:
        return
    before = len(main.problems)
    main.attempt(lambda: check_trunk(file, config))
    main.whole = len(main.problems) == before
    if main.tokenizer is not None and main.tokenizer.vocab_size > config.vocab:
        main.problems.append(
            Problem(
                f"{file.path}: the tokenizer has {main.tokenizer.vocab_size} tokens, the embedding "
                f"{config.vocab} rows",
                "get a file whose tokenizer and tensors were written together",
            )
        )
    if main.drafter.layout is not None:
        _examine_own_block(main, config)
    if context > config.context_length:
        main.notes.append(
            f"a context of {context} tokens is more than the model's {config.context_length}"
        )


def _examine_own_block(main: _Subject, config: ModelConfig) -> None:
    fit = _fit(main, main, config)
    main.fits.append(fit)
    main.problems += [
        Problem(problem.what, f"{problem.fix}; without drafts: mtp.draft=0")
        for problem in fit.problems
    ]


def _explain_missing_block(main: _Subject) -> None:
    """What metadata or tensors say about a drafter whose MTP block is not in the file."""
    claimed, blocks = main.drafter.claimed, _trunk_blocks(main.file)
    count = main.file.metadata.get(f"{ARCHITECTURE}.block_count")
    if claimed and isinstance(count, int) and blocks == count - claimed:
        main.problems.append(
            Problem(
                f"{main.file.path}: the metadata claim {claimed} MTP block as part of block_count="
                f"{count}, but no tensor of it is in the file",
                f"set {ARCHITECTURE}.block_count to {blocks} and remove "
                f"{ARCHITECTURE}.nextn_predict_layers, or get a file with the block",
            )
        )
    elif main.drafter.dspark is not None:
        main.notes.append(
            f"its drafter is DSpark ({main.drafter.dspark}), which is not covered: it runs without "
            "drafts"
        )
    elif claimed:
        main.notes.append(
            f"the metadata claim {claimed} MTP layer, but no MTP tensor is in the file: give an "
            "MTP file to draft"
        )
    entries = main.file.metadata.get(f"{ARCHITECTURE}.attention.compress_ratios")
    if isinstance(entries, list) and isinstance(count, int) and len(entries) > count + 1:
        main.notes.append(
            f"attention.compress_ratios has {len(entries)} entries for {count} layers, "
            "like the later release that drafts with DSpark: an MTP block of the first release may "
            "not belong to it"
        )


# --- MTP files -----------------------------------------------------------------------------------


def _examine_block(block: _Subject, mains: list[_Subject]) -> None:
    file = block.file
    if block.drafter.layout == "nextn":  # a sidecar repeats the main file's metadata
        try:
            block.config = ModelConfig.from_gguf(file)
        except ModelFileError as error:
            block.notes.append(f"its own metadata are not a configuration: {error.what}")
    for main in mains:
        if main.config is not None:
            block.fits.append(_fit(block, main, main.config))
    if any(fit.ok for fit in block.fits):
        return
    if block.fits:
        block.problems += [problem for fit in block.fits for problem in fit.problems]
        return
    if mains:
        block.problems.append(
            Problem(
                f"{file.path} cannot be compared with {mains[0].file.path.name}, which has no "
                "valid configuration",
                "see the reasons given for that file",
            )
        )
        return
    if block.drafter.layout is None:
        claim = f"; its metadata claim {block.drafter.claimed}" if block.drafter.claimed else ""
        block.problems.append(
            Problem(f"{file.path} holds no MTP block{claim}", "download the file again")
        )
        return
    config = block.config
    if config is not None:
        block.attempt(lambda: load_mtp(file, config))
    block.problems.append(
        Problem(f"{file.path} is an MTP block, which needs a main model to run", GIVE_BOTH)
    )


def _fit(block: _Subject, main: _Subject, config: ModelConfig) -> Fit:
    """Load the block for the main file, as a run would; matrices are mapped, not read."""
    problems: tuple[Problem, ...] = ()
    same = _same_tokenizer(block, main)
    draft = own = None
    try:
        weights = load_mtp(block.file, config, main.file)
    except ModelFileError as error:
        problems = (Problem(error.what, error.fix),)
    else:
        if weights.degraded is not None and block.drafter.degraded is None:
            block.drafter = replace(block.drafter, degraded=weights.degraded)
            block.notes.append(weights.degraded)
        if same is False:
            block.notes.append(
                f"its tokenizer is not quite that of {main.file.path.name} (types or merges); the "
                "main file's is used"
            )
        if main.whole:
            tensors = mtp_tensors(block.file, main.file.tensors, config, weights.layout)
            draft = draft_bytes(tensors, main.file.tensors, config)
            own = own_bytes(tensors, main.file.tensors, config)
    return Fit(str(main.file.path), not problems, problems, same, draft, own)


def _same_tokenizer(block: _Subject, main: _Subject) -> bool | None:
    """Whether both files carry the same tokenizer; None where one has none that can be built."""
    if block is main or main.tokenizer is None:
        return None
    if block.tokenizer is None:
        try:
            block.tokenizer = Tokenizer.from_metadata(block.file.metadata)
        except ModelFileError:
            return None
    return block.tokenizer.digest == main.tokenizer.digest


# --- reports -------------------------------------------------------------------------------------


def _report(
    subject: _Subject, subjects: list[_Subject], context: int, bandwidth_gbs: float | None
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


def _block_of(main: _Subject, subjects: list[_Subject]) -> tuple[_Subject | None, Fit | None]:
    """The MTP block that this main file would draft with: a file that fits it, else its own."""
    for subject in sorted(subjects, key=lambda subject: subject is main):
        for fit in subject.fits:
            if fit.ok and fit.main == str(main.file.path):
                return subject, fit
    return None, None


def _verdict(subject: _Subject, block: _Subject | None) -> str:
    count = len(subject.problems)
    if count:
        return f"does not run: {count} reason{'s' if count > 1 else ''}"
    if subject.role == "mtp":
        return f"fits {', '.join(fit.main for fit in subject.fits if fit.ok)}"
    if block is None:
        return "runs without drafts: no MTP block was given"
    return f"runs, drafts with {'its own MTP block' if block is subject else block.file.path}"


def _dimensions(subject: _Subject) -> dict[str, object] | None:
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


def _vocabulary(subject: _Subject) -> Vocabulary | None:
    if subject.tokenizer is not None:
        return Vocabulary(subject.tokenizer.vocab_size, subject.tokenizer.digest)
    tokens = subject.file.metadata.get("tokenizer.ggml.tokens")
    return Vocabulary(len(tokens), None) if isinstance(tokens, list) else None
