"""What frameworks write into checkpoints by themselves has no secrets."""

from typing import Any

import pytest
import torch
from one_call import Model, find_names, prepare, train

WRITERS = [
    "lightning.pytorch.strategies.strategy",
    "lightning.fabric.strategies.strategy",
    "pytorch_lightning.strategies.strategy",
    "accelerate.checkpointing",
]


def ask(module: str, question: str, one: Any) -> Any:
    """Ask as a module with this name does."""
    return eval(question, {"__name__": module, "one": one})  # noqa: S307 (above)


@pytest.mark.parametrize("writer", WRITERS)
def test_states_have_secrets_for_the_user_alone(writer) -> None:
    private = prepare(Model().double())
    for one in (private, private.optimizer, private.data_loader):
        state = ask(writer, "one.state_dict()", one)
        assert "secrets" not in find_names(state)
        assert "secrets" in find_names(ask("lightning_user", "one.state_dict()", one))
        one.load_state_dict(state)


def test_lightning_does_not_count_parts() -> None:
    """It would leave a batch where as many parts as batches were taken."""
    for most, does_split in ((3, True), (24, False), (None, False)):
        loader = prepare(Model().double(), max_batch_size=most).data_loader
        assert ask("lightning_user", "len(one)", loader) == 4
        if does_split:
            with pytest.raises(RuntimeError, match="max_batch_size=3 makes more of them"):
                ask(WRITERS[0], "len(one)", loader)
        else:
            assert ask(WRITERS[0], "len(one)", loader) == 4


def test_a_state_that_accelerate_saves_resumes_without_secrets(tmp_path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = Model().double()
    private = prepare(accelerator.prepare_model(model))
    accelerator.register_for_checkpointing(private)
    accelerator.prepare(private.optimizer)  # which is not asked for
    train(private, model, 1)
    accelerator.save_state(tmp_path)
    files = [*tmp_path.glob("optimizer*"), *tmp_path.glob("custom*")]
    states = [torch.load(path, weights_only=False) for path in files]
    assert len(states) == 2
    assert "spent" in find_names(states)
    assert "secrets" not in find_names(states)

    again = prepare(Model().double())
    again.load_state_dict(states[1])
    assert again.spent.steps == private.spent.steps == 4
