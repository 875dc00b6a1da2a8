"""DeepSeek-V4 files together: main models, MTP blocks, and which block belongs to which model.

Promise: a file gets the verdict that loading it would give, with all the reasons, because the same
checks give it; no rule of the loader is repeated here.
"""

from __future__ import annotations

from dataclasses import replace

from ds4flow.doctor.accounting import draft_bytes, mtp_tensors, own_bytes
from ds4flow.doctor.assemble import report_of
from ds4flow.doctor.report import FileReport, Fit, Problem
from ds4flow.doctor.subject import Subject, subject_of, trunk_blocks
from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ARCHITECTURE, ModelConfig
from ds4flow.model.mtp_weights import load_mtp
from ds4flow.model.slots import check_trunk
from ds4flow.tokenizer import Tokenizer

GIVE_BOTH = "give the main file as well: ds4flow inspect MAIN.gguf MTP.gguf"


def examine_models(
    files: list[GgufFile], context: int, bandwidth_gbs: float | None
) -> list[FileReport]:
    """One report per file, in order; MTP files are compared with every main file among them."""
    subjects = [subject_of(file) for file in files]
    mains = [subject for subject in subjects if subject.role == "main"]
    for main in mains:
        _examine_main(main, context)
    for subject in subjects:
        if subject.role == "mtp":
            _examine_block(subject, mains)
    return [report_of(subject, subjects, context, bandwidth_gbs) for subject in subjects]


# --- main files ----------------------------------------------------------------------------------


def _examine_main(main: Subject, context: int) -> None:
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


def _examine_own_block(main: Subject, config: ModelConfig) -> None:
    fit = _fit(main, main, config)
    main.fits.append(fit)
    main.problems += [
        Problem(problem.what, f"{problem.fix}; without drafts: mtp.draft=0")
        for problem in fit.problems
    ]


def _explain_missing_block(main: Subject) -> None:
    """What metadata or tensors say about a drafter whose MTP block is not in the file."""
    claimed, blocks = main.drafter.claimed, trunk_blocks(main.file)
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
            f"the metadata claim {claimed} MTP layer, but no MTP tensor is in the file: drafting "
            "needs a separate MTP file"
        )
    entries = main.file.metadata.get(f"{ARCHITECTURE}.attention.compress_ratios")
    if isinstance(entries, list) and isinstance(count, int) and len(entries) > count + 1:
        main.notes.append(
            f"attention.compress_ratios has {len(entries)} entries for {count} layers, "
            "like the later release that drafts with DSpark: an MTP block of the first release may "
            "not belong to it"
        )


# --- MTP files -----------------------------------------------------------------------------------


def _examine_block(block: Subject, mains: list[Subject]) -> None:
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


def _fit(block: Subject, main: Subject, config: ModelConfig) -> Fit:
    """Load the block for the main file, as a run would; only vectors and `eh_proj` are read."""
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


def _same_tokenizer(block: Subject, main: Subject) -> bool | None:
    """Whether both files carry the same tokenizer; None where one has none that can be built."""
    if block is main or main.tokenizer is None:
        return None
    if block.tokenizer is None:
        try:
            block.tokenizer = Tokenizer.from_metadata(block.file.metadata)
        except ModelFileError:
            return None
    return block.tokenizer.digest == main.tokenizer.digest
