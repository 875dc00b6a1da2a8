"""Finding the model files: what passes here is present, well-formed and has its checksum."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4flow import model_files
from ds4flow.errors import Ds4FlowError, ModelFileError, UsageError
from ds4flow.fetching import fetch_shown
from ds4flow.gguf import GgufFile
from ds4flow.hub import HubFile
from ds4flow.model.mtp_weights import find_mtp_layout
from ds4flow.packaged import resolve
from ds4flow.pipeline import Files, Stage, State

if TYPE_CHECKING:
    from ds4flow.synth.unwritten import Unwritten


@dataclass
class LocalFiles(Stage):
    """Opens files that are on this machine.

    A file is a path, a file of this package (`pkg://PACKAGE/NAME`), or a file of the hub repository
    that lies in `folder` already. The MTP block may be a file of its own or a part of the main
    file. Only headers are read, except to compare a SHA-256.
    """

    path: str | None
    mtp_path: str | None
    sha256: str | None
    mtp_sha256: str | None
    repo: str | None
    file: str | None
    mtp_file: str | None
    folder: str
    offline: bool
    uses_mtp: bool
    draft: int | str
    no_gpu: bool

    writes = ("files",)

    def share(self, state: State) -> None:
        """Set `files`, for any number of prompts."""
        main = _checked(self._main_path(), self.sha256, "model.sha256")
        mtp = None
        mtp_path = self._mtp_path()
        if mtp_path is not None:
            mtp = _checked(mtp_path, self.mtp_sha256, "model.mtp_sha256")
        elif find_mtp_layout(main) is not None:
            mtp = main
        state.files = Files(main, mtp)

    def share_key(self) -> object:
        """Which files: the MTP file may depend on whether the run drafts, never on how deep."""
        keys = {item.name: getattr(self, item.name) for item in fields(self)}
        return type(self), *(keys | {"draft": self.draft != 0}).values()

    def run(self, state: State) -> None:
        """Set `files`, and record what they are."""
        if state.files is None:
            self.share(state)
        main, mtp = state.files
        digest = self.sha256 if mtp is main else self.mtp_sha256
        state.run.record(
            files={
                "main": model_files.facts(main, self.sha256),
                "mtp": mtp and model_files.facts(mtp, digest),
            }
        )

    def _main_path(self) -> Path:
        if self.path is not None:
            return resolve(self.path, "model.path")
        if self.repo is None or self.file is None:
            raise UsageError(
                "model.path is not set, so there is no model to load",
                "type model.path=FILE.gguf or -m FILE.gguf, or use model=demo",
            )
        return self._from_hub(self.repo, self.file, self.sha256)

    def _from_hub(self, repo: str, name: str, sha256: str | None) -> Path:
        """The path of a hub file, which must lie in the folder already."""
        path = Path(self.folder) / Path(name).name
        if not path.exists():
            raise ModelFileError(
                f"{path} is not on this machine, and download=local fetches nothing",
                f"use download=hub, get {name} from the hub repository {repo} into {self.folder}/, "
                "or type model.path=FILE.gguf",
            )
        return path

    def _mtp_path(self) -> Path | None:
        if self.mtp_path is not None:
            return resolve(self.mtp_path, "model.mtp_path")
        # Beside a file of the user's own, nobody said that the hub's MTP file belongs to it.
        if self.path is not None or self.mtp_file is None or self.repo is None:
            return None
        return self._mtp_from_hub(self.repo, self.mtp_file)

    def _mtp_from_hub(self, repo: str, name: str) -> Path | None:
        path = Path(self.folder) / Path(name).name
        return path if path.exists() else None


@dataclass
class HubFiles(LocalFiles):
    """Fetches what is not here yet from the hub repository; what is present and verified is kept.

    A model without a repository (`model.path`) is never looked for on the network. The MTP file is
    fetched only for a run that drafts with it.
    """

    def _from_hub(self, repo: str, name: str, sha256: str | None) -> Path:
        # The token, if one is needed, is what huggingface_hub finds: HF_TOKEN or the cached login.
        return fetch_shown(
            HubFile(repo, name, sha256=sha256), Path(self.folder), offline=self.offline
        )

    def _mtp_from_hub(self, repo: str, name: str) -> Path | None:
        if not self.uses_mtp or self.draft == 0 or self.no_gpu:
            return None
        return self._from_hub(repo, name, self.mtp_sha256)


@dataclass
class SynthFiles(LocalFiles):
    """The headers of a synthetic model that lies on no disk; `synth` says which, see `Unwritten`.

    What is recorded as a file's SHA-256 is that of recipe and seed, which decide every weight.
    """

    synth: dict[str, Any] | None

    def __post_init__(self) -> None:
        self._unwritten()  # wrong keys are found before anything else

    def share(self, state: State) -> None:
        """Set `files`, for any number of prompts."""
        state.files = Files(*self._unwritten().headers())

    def share_key(self) -> object:
        """The recipe and the seed."""
        return type(self), self._unwritten().sha256()

    def run(self, state: State) -> None:
        """Set `files`, and record what they would be."""
        if state.files is None:
            self.share(state)
        unwritten = self._unwritten()
        digest = unwritten.sha256()
        state.run.record(
            files={
                name: {"path": str(file.path), "bytes": file.size, "shards": 0, "sha256": digest}
                for name, file in zip(("main", "mtp"), state.files, strict=True)
                if file is not None
            },
            synth=unwritten.facts(),
        )

    def _unwritten(self) -> Unwritten:
        from ds4flow.synth.unwritten import Unwritten

        if self.synth is None:
            raise UsageError("download=synth makes no files up by itself", "use model=synth-flash")
        return Unwritten.flash(self.synth)


def _checked(path: Path, sha256: str | None, key: str) -> GgufFile:
    file = GgufFile.open(path)
    if sha256 is not None and file.sha256() != sha256.lower():
        raise Ds4FlowError(
            f"{file.path} has the SHA-256 {file.sha256()}, but {key} is {sha256}",
            f"get the file again, or correct {key}",
        )
    return file
