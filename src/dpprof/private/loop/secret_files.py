"""Keeps what must stay secret in files of its own, apart from what is published.

From the state of a generator the noise of the coming steps follows, and from these and a published
model the exact sums of samples. Checkpoints are published as whole folders.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_STEPS = "private_steps.json"  # in an output folder: the steps of each run that were saved

_APART = "secrets"
"""The entry of a state that is not published, with all that is in it: what noise and samples follow
from, and counts that follow from the samples which were drawn."""


def split_secrets(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state of nested dictionaries without its secrets, and these under the same names."""
    public: dict[str, Any] = {}
    secrets: dict[str, Any] = {}
    for name, value in state.items():
        if name == _APART:
            secrets[name] = value
        elif isinstance(value, dict):
            public[name], secrets[name] = split_secrets(value)
        else:
            public[name] = value
    return public, secrets


def join_secrets(public: dict[str, Any], secrets: dict[str, Any]) -> dict[str, Any]:
    """Undo ``split_secrets``."""
    joined = {
        name: value if name == _APART else join_secrets(public[name], value)
        for name, value in secrets.items()
    }
    return public | joined


def find_secrets(checkpoint: str | Path, folder: str | Path | None) -> Path:
    """Return where the secrets of a checkpoint, in an output folder, are, or would be.

    They are in ``folder``, or beside the output folder, in one whose name ends with
    ``_secrets``: whatever copies the output folder leaves it out.
    """
    path = Path(checkpoint).absolute()
    beside = path.parent.with_name(f"{path.parent.name}_secrets")
    return (beside if folder is None else Path(folder)) / path.name


def refuse_published(folder: str | Path, output_dir: str | Path) -> None:
    """Refuse a folder for secrets within an output folder, which is published (``ValueError``)."""
    if Path(folder).resolve().is_relative_to(Path(output_dir).resolve()):
        raise ValueError(
            f"secrets_folder {folder} would be published with {output_dir}; name one outside of it"
        )


@contextmanager
def writing_secrets(folder: Path) -> Iterator[None]:
    """Let nobody else read what is written inside the context; make the folder, of mode 0700.

    Files have mode 0600. The mask is that of the whole process.
    """
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / ".gitignore").write_text("*\n")
        yield
    finally:
        os.umask(before)


def read_secrets(path: Path, checkpoint: str | Path, name: str) -> dict[str, Any]:
    """Read the secrets of a checkpoint, which calls them ``name`` (``ValueError`` for others)."""
    if not path.exists():
        raise ValueError(
            f"{checkpoint} has no secrets at {path}: only a run with "
            "PrivacyArguments(resume='exact') writes them; name the folder of its secrets as "
            "secrets_folder, or let resume='fresh' draw other noise and samples"
        )
    secrets: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if secrets.pop("name") != name:
        raise ValueError(
            f"{path} has the secrets of another checkpoint than {checkpoint}, and would add the "
            "noise of other samples; use a folder for each run, or resume='fresh'"
        )
    return secrets


def find_checkpoints(output_dir: str | Path) -> list[Path]:
    """List the folders of checkpoints in an output folder."""
    return sorted(Path(output_dir).glob("checkpoint-*"))


def note_steps(args: Any, run: str, steps: int) -> None:
    """Note how many steps of a run were saved, maybe published, whatever is removed later.

    ``args`` are transformers' ``TrainingArguments``; a run without a name saved nothing.
    """
    if args.should_save and run:
        path = Path(args.output_dir, _STEPS)
        path.write_text(json.dumps(_read_steps(path) | {run: steps}))


def refuse_saved_steps(checkpoint: str | Path, run: str, step: int) -> None:
    """Refuse to draw other samples for steps that were saved (``ValueError``)."""
    path = Path(checkpoint).resolve().parent / _STEPS
    saved = _read_steps(path).get(run, 0)
    if saved > step:
        raise ValueError(
            f"{saved:,} steps of this run were saved, and {checkpoint} is of {step:,}: those "
            "between would be taken once more on other samples, and be counted once; resume from "
            f"the last checkpoint, or remove {path} if nothing of later ones was published"
        )


def _read_steps(path: Path) -> dict[str, int]:
    steps: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return steps
