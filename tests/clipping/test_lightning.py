"""Lightning with private steps, as its page says; and what would break them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import TRAINERS, find_code
from one_call import find_names, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

LOOP = find_code(TRAINERS, "LightningModule")
SAMPLES, T, V = 20, 3, 7
pytestmark = pytest.mark.filterwarnings("ignore:::lightning")


@pytest.fixture(name="train")
def trained(tmp_path, monkeypatch) -> Callable[..., Any]:
    """Return what trains as documented, with another module, loader or trainer."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 4), nn.Linear(4, V))
    ids = torch.randint(V, (SAMPLES, T))
    usual = DataLoader(TensorDataset(ids, ids), batch_size=10, shuffle=True)
    names: dict[str, Any] = {}
    text, end = LOOP.rsplit("\n\n\n", 1)
    assert end == "Trainer(max_epochs=3).fit(PrivateModule(model, data_loader))\n"
    exec(text, names)  # noqa: S102 (the document is the project's own)

    def train(change=lambda module: module, fit=None, **options: Any) -> Any:
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 3}
        module = change(names["PrivateModule"])(copy.deepcopy(model), usual)
        lightning.Trainer(**quiet | options).fit(module, **fit or {})
        return module

    return train


def test_the_loop_trains_in_parts_and_its_checkpoints_resume_without_secrets(train) -> None:
    module = train(max_epochs=2)
    assert module.trainer.global_step == module.private.spent.steps == 4
    (path,) = Path().rglob("*.ckpt")
    saved = torch.load(path, weights_only=False)
    assert "spent" in saved["optimizer_states"][0]["privacy"]
    assert "secrets" not in find_names(saved)

    again = train(fit={"ckpt_path": path})
    assert not torch.equal(weights(again.model), weights(module.model))
    assert again.private.spent.steps == 6
    assert 2.9 < again.private.epsilon_spent() <= 3


def automatic(module: type) -> type:
    def begin(self, *given: Any) -> None:
        module.__init__(self, *given)
        self.automatic_optimization = True

    def step(self, _: Any) -> Any:
        return self.sample_losses(*next(self.parts)).mean()

    return type("Automatic", (module,), {"__init__": begin, "training_step": step})


def with_step(step: Callable[[Any, Any], None]) -> Callable[[type], type]:
    return lambda module: type("Other", (module,), {"training_step": step})


def save_within_a_batch(module: Any, _: Any) -> None:
    module.private.optimizer.backward(module.sample_losses, *next(module.parts))
    module.trainer.save_checkpoint("within.ckpt")


def step_alone(module: Any, _: Any) -> None:
    module.private.optimizer.backward(module.sample_losses, *next(module.parts))
    module.private.optimizer.original_optimizer.step()


def clip_what_comes(module: Any, batch: Any) -> None:
    module.private.optimizer.backward(module.sample_losses, *batch)


def other() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*torch.ones(2, SAMPLES, T, dtype=torch.long)), batch_size=10)


def scale() -> Any:
    scaler = torch.amp.GradScaler("cpu")
    return lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


MISUSES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "automatic optimization": (lambda: {"change": automatic}, "in place of loss.backward"),
    "manual_backward": (
        lambda: {
            "change": with_step(
                lambda self, _: self.manual_backward(self.sample_losses(*next(self.parts)).mean())
            )
        },
        "in place of loss.backward",
    ),
    "the original optimizer": (
        lambda: {"change": with_step(step_alone)},
        "AdamW was asked to step on gradients without noise",
    ),
    "a checkpoint within a batch": (
        lambda: {"change": with_step(save_within_a_batch)},
        "a state cannot be saved within a batch",
    ),
    "another data loader": (
        lambda: {"change": with_step(clip_what_comes), "fit": {"train_dataloaders": other()}},
        "these samples were not drawn by the private data loader",
    ),
    "a scaler": (lambda: {"plugins": [scale()]}, "GradScaler does not work with clipping"),
    "more epochs": (lambda: {"max_epochs": 4}, "the privacy budget is spent"),
    "clipping": (lambda: {"gradient_clip_val": 1.0}, "clipping is not supported for manual"),
    "accumulation": (lambda: {"accumulate_grad_batches": 2}, "accumulation is not supported"),
    "several devices": (
        lambda: {"devices": 2, "strategy": "ddp_fork"},
        "DistributedDataParallel runs this model, and its Clipping does not know",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_would_break_the_guarantee_is_refused(train, name) -> None:
    options, sentence = MISUSES[name]
    with pytest.raises(Exception, match=sentence):
        train(**options(), enable_checkpointing=False, logger=False)
