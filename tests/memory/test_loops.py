"""Training loops as their sources write them: an estimate of the loop is what they allocate."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from factory import make_experiment
from snapshots import assert_sentences, refusals_of
from torch.nn import functional

from dpprof.predict.estimate import estimate
from dpprof.predict.tracing import TimelineRecorder, record_cpu, record_timelines
from dpprof.subjects.methods.standard import Standard
from dpprof.subjects.methods.training_step import Batch, Enter
from dpprof.subjects.setup import import_method, set_up

HF = {"model": "hf:tiny-llama", "batch_size": 3, "seq_len": 24}
PADDED = HF | {"padding": {"fraction": 0.3}}
OWN = {"model": {"vocab_size": 500, "d_model": 16, "layers": 2, "heads": 2}, "batch_size": 3}
OWN |= {"seq_len": 24}
B, T, V = 3, 24, 500
WRAPPED = 64
"""Bytes of scalars: of a mean of one loss, and of numbers that PyTorch wraps into tensors."""


class AsWritten(Standard):
    """A step whose forward and backward pass are those of a published loop."""

    run_loop: ClassVar[Callable[..., torch.Tensor]]

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        enter("forward")
        loss = type(self).run_loop(self, batch)
        enter("backward")
        loss.backward()


def hf_trainer(step: AsWritten, batch: Batch) -> torch.Tensor:
    """transformers 5.23, Trainer.compute_loss."""

    def compute_loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        outputs = model(**inputs)
        return outputs["loss"]

    return compute_loss(step.module.model, name(batch) | {"use_cache": False})


def hf_manual(step: AsWritten, batch: Batch) -> torch.Tensor:
    """transformers, run_clm_no_trainer.py."""
    step.outputs = step.module.model(**name(batch))
    return step.outputs.loss


def opacus_tutorial(step: AsWritten, batch: Batch) -> torch.Tensor:
    """Opacus's tutorial of image classifiers, with a class for each token."""
    step.output = step.module(*batch.inputs)
    return functional.cross_entropy(step.output.flatten(0, 1), batch.labels.flatten())


def timm(step: AsWritten, batch: Batch) -> torch.Tensor:
    """timm, benchmark.py; the output lives as long as the function that has the step."""
    step.output = None
    return opacus_tutorial(step, batch)


def name(batch: Batch) -> dict[str, Any]:
    B, T = batch.x.shape
    positions = torch.arange(T).repeat(B, 1)
    named = {"input_ids": batch.x, "attention_mask": batch.mask_BT, "position_ids": positions}
    return named | {"labels": batch.x}


def record(loop: Callable[..., torch.Tensor], **fields: Any) -> int:
    """Record the peak of the loop's second step, in bytes."""
    experiment = make_experiment(method="standard", **fields)
    kind = type("Written", (AsWritten,), {"run_loop": staticmethod(loop)})
    with record_cpu() as recorder:
        training = set_up(experiment, kind, torch.device("cpu"), lambda *_: None)
        timeline_recorder = TimelineRecorder(recorder, training.step, lambda _: None)
        return record_timelines(timeline_recorder, training.batch, 2)[1].peak_bytes


def predict(**fields: Any) -> int:
    return estimate(make_experiment(**fields), lambda _: None).memory.peak_allocated_bytes


@pytest.mark.parametrize(
    ("name_of_loop", "written", "fields"),
    [
        ("hf-trainer", hf_trainer, HF),
        ("hf-manual", hf_manual, HF),
        ("hf-manual", hf_manual, PADDED),
        ("opacus-tutorial", opacus_tutorial, OWN),
        ("timm", timm, OWN),
    ],
)
def test_an_estimate_of_a_loop_is_what_its_source_allocates(name_of_loop, written, fields) -> None:
    predicted = predict(method="standard", loop=name_of_loop, **fields)

    assert 0 <= predicted - record(written, **fields) <= WRAPPED + 8 * B * T


def test_keys_and_values_of_a_cache_live_as_long_as_the_logits() -> None:
    """Under a mask attention repeats 2 heads of 8 to 4 in each of 2 layers: it saves copies."""
    fields = {**PADDED, "method": "standard"}
    kept, freed = (
        [predict(**fields, loop=loop, use_cache=cached) for cached in (True, False)]
        for loop in ("hf-manual", "hf-trainer")
    )

    assert kept[0] - kept[1] == 2 * 2 * B * T * 2 * 8 * 4
    assert freed[0] == freed[1]


def test_what_a_loop_keeps_and_copies_is_what_its_logits_take() -> None:
    """At the peak, in backward: kept, 2 bytes for each; copied, 4 bytes in place of 2."""
    fields = {**OWN, "method": "standard", "dtype": "bfloat16"}
    usual, kept = predict(**fields), predict(**fields, keep_logits=True)
    short = predict(**fields, loss_dtype="logits")

    assert kept - usual == 2 * B * T * V
    # The logarithms of probabilities, their gradient, and that of the logits.
    assert usual - short == pytest.approx(3 * 2 * B * T * V, abs=8 * B * T)
    assert predict(**fields, loop="opacus-tutorial") - short == 2 * B * T * V


def test_pieces_of_the_loss_spare_one_tensor_of_the_size_of_logits() -> None:
    """Whole: logarithms and two gradients, in backward; in pieces: logits and logarithms."""
    wide = OWN | {"model": {**OWN["model"], "vocab_size": 5000}, "method": "standard"}
    whole, pieces = predict(**wide), predict(**wide, loop="torchtune")

    assert whole - pieces == pytest.approx(4 * B * T * 5000, rel=0.01)


def test_opacus_ghost_clipping_holds_no_logits_between_its_two_passes() -> None:
    """Beside per-sample gradients it needs norms and losses: numbers of samples and tokens."""
    fields = {**HF, "lora": "rank=2", "dtype": "bfloat16"}
    ghost, hooks = (predict(method=f"opacus-{name}", **fields) for name in ("ghost", "hooks"))

    assert 0 <= ghost - hooks < 8 * B * T


def test_a_loss_that_a_method_cannot_have_is_unsupported() -> None:
    assert_sentences("memory/losses", refusals_of(predict))


def test_samples_of_labels_have_the_loss_of_their_logits() -> None:
    """The mean of all is transformers' own, where samples have as many tokens."""
    trainings = [
        set_up(one, import_method(one), torch.device("cpu"), lambda *_: None)
        for one in (
            make_experiment(**HF, method="standard", loss="labels"),
            make_experiment(**HF, method="flash-bk", loss="labels"),
            make_experiment(**HF, method="standard"),
        )
    ]
    batch = trainings[0].batch
    inputs = (batch.inputs, batch.inputs, batch.inputs[:-1])
    of_batch, of_samples, logits_BTV = (
        training.step.module(*tensors) for training, tensors in zip(trainings, inputs, strict=True)
    )

    assert of_samples.shape == (B,)
    torch.testing.assert_close(of_samples.mean(), of_batch)
    expected = functional.cross_entropy(logits_BTV[0, :-1], batch.x[0, 1:])
    torch.testing.assert_close(of_samples[0], expected)
