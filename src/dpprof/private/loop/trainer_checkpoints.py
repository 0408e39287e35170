"""Checkpoints of a private ``Trainer``: all that a resumed run needs, secrets apart."""

import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpprof.private.loop.secret_files import (
    find_checkpoints,
    find_secrets,
    join_secrets,
    note_steps,
    read_secrets,
    refuse_published,
    refuse_saved_steps,
    split_secrets,
    writing_secrets,
)
from dpprof.private.loop.trainer_base import PrivateBase


class PrivateCheckpoints(PrivateBase):
    """The part of a private ``Trainer`` that saves and resumes."""

    _checkpoints: frozenset[Path] = frozenset()
    _run = ""  # the name of a training, which a resumed one goes on with
    _has_private_logs = False

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._remove_secrets()
        note_steps(self.args, self._run, self.state.global_step)

    def _remove_secrets(self) -> None:
        """Remove the secrets of checkpoints that were there before, and were removed since."""
        if self.privacy.resume == "exact" and self.args.should_save:
            present = frozenset(find_checkpoints(self.args.output_dir))
            for removed in self._checkpoints - present:
                shutil.rmtree(self._secrets_of(removed), ignore_errors=True)
            self._checkpoints = present

    def _state(self) -> dict[str, Any]:
        assert self._steps is not None
        return {
            "loader": self._steps.loader.state_dict(exact=True),
            "privacy": self.private_optimizer.state_dict(exact=True)["privacy"],
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._steps is not None
        if self._steps.handed != self.private_optimizer.steps:
            raise RuntimeError(
                "a checkpoint can be saved after a step alone, and here a batch was drawn whose "
                "step was not taken: a resumed run would add its noise to other samples"
            )
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have come so far
        self._run = self._run or uuid.uuid4().hex
        self._has_private_logs |= self.privacy.log_private
        public, secrets = split_secrets(self._state())
        public["run"], public["has private logs"] = self._run, self._has_private_logs
        secrets["name"] = public["name of secrets"] = uuid.uuid4().hex
        torch.save(public, folder / self._name_of_rank("private", "pt"))
        if self.args.should_save:
            inner = self.private_optimizer.original_optimizer
            torch.save(inner.state_dict(), folder / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
        self._secrets = secrets

    def _secrets_of(self, checkpoint: str | Path) -> Path:
        return find_secrets(checkpoint, self.privacy.secrets_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the states of all generators apart from the checkpoint, if they are needed."""
        if self.privacy.resume == "exact":
            folder = self._secrets_of(output_dir)
            refuse_published(folder, self.args.output_dir)
            with writing_secrets(folder):
                super()._save_rng_state(str(folder))
                torch.save(self._secrets, folder / self._name_of_rank("secrets", "pt"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore what an exact run drew from; a fresh one draws from its own secret already."""
        if checkpoint is not None and self.privacy.resume == "exact":
            super()._load_rng_state(str(self._secrets_of(checkpoint)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load all that a resumed run needs, or refuse: it would repeat noise on other samples."""
        if checkpoint is None:
            return
        own = self._name_of_rank("private", "pt")
        for name in (own, "optimizer.pt", "scheduler.pt"):
            if not Path(checkpoint, name).exists():
                raise ValueError(
                    f"{checkpoint} has no {name}: it was saved by another Trainer, or not to the "
                    "end, and to resume from it would draw samples and noise that its accountant "
                    "does not know"
                )
        state, optimizer, scheduler = (
            torch.load(Path(checkpoint, name), map_location="cpu", weights_only=True)
            for name in (own, "optimizer.pt", "scheduler.pt")
        )
        self._run, self._has_private_logs = state.pop("run"), state.pop("has private logs")
        if self._has_private_logs and not self.privacy.log_private:
            raise ValueError(
                f"the trainer_state.json of {checkpoint} has private logs and counts, which later "
                "checkpoints would repeat; give PrivacyArguments(log_private=True)"
            )
        name, exact = state.pop("name of secrets", None), self.privacy.resume == "exact"
        if exact:
            path = self._secrets_of(checkpoint) / self._name_of_rank("secrets", "pt")
            state = join_secrets(state, read_secrets(path, checkpoint, name))
        whole = optimizer | {"privacy": state["privacy"]}
        self.private_optimizer.load_state_dict(whole, exact=exact)
        self.lr_scheduler.load_state_dict(scheduler)
        assert self._steps is not None
        self._steps.loader.load_state_dict(state["loader"], exact=exact)
        self._steps.handed = self.private_optimizer.steps
        if self.private_optimizer.steps != self.state.global_step:
            raise ValueError(
                f"{checkpoint} is of {self.private_optimizer.steps:,} private steps, and its "
                f"trainer_state.json of {self.state.global_step:,}; resume from another checkpoint"
            )
        if self._draws_anew:
            refuse_saved_steps(checkpoint, self._run, self.state.global_step)

    def _name_of_rank(self, stem: str, suffix: str) -> str:
        """Name a file that each of several ranks has, as ``Trainer`` does."""
        rank = f"_{self._ranks.rank}" if self._ranks.size > 1 else ""
        return f"{stem}{rank}.{suffix}"
