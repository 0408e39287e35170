"""The batches of each task, and the losses of their samples by definition."""

import pytest
import torch
from factory import make_experiment

from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import UNLABELLED, sample_losses
from dpprof.subjects.batches import make_batch
from dpprof.subjects.models.build import build_model

B, T = 3, 20


def make(task: str, model: str = "tiny-bert", **fields):
    experiment = make_experiment(
        model={"hf": model, "task": task}, **{"batch_size": B, "seq_len": T} | fields
    )
    torch.manual_seed(0)
    model = build_model(experiment).eval()
    return model, make_batch(model, torch.device("cpu"), experiment)


def define_loss(logits, labels) -> torch.Tensor:
    """Return a sample's loss: the mean of -log p over its labels, one by one."""
    found = [
        -torch.log(torch.softmax(row, 0)[label])
        for row, label in zip(logits, labels, strict=True)
        if label != UNLABELLED
    ]
    return torch.stack(found).mean()


def test_a_sample_of_a_classifier_has_one_class() -> None:
    model, batch = make("sequence-classification", padding=0.3)
    logits_BC = model(*batch.inputs)

    assert logits_BC.shape == (B, 5)
    assert batch.labels.shape == (B,)
    assert 0 <= batch.labels.min() <= batch.labels.max() < 5
    expected = [define_loss(logits_BC[row][None], batch.labels[row][None]) for row in range(B)]
    torch.testing.assert_close(sample_losses(logits_BC, batch.labels), torch.stack(expected))


@pytest.mark.parametrize("task", ["token-classification", "masked-lm"])
def test_labels_of_tokens_are_averaged_over_each_sample_and_padding_has_none(task) -> None:
    model, batch = make(task, padding=0.3)
    logits_BTC = model(*batch.inputs)

    assert batch.labels.shape == batch.x.shape == (B, T)
    assert (batch.labels[batch.mask_BT == 0] == UNLABELLED).all()
    labelled = (batch.labels != UNLABELLED).sum(1)
    assert (labelled >= 1).all()
    if task == "masked-lm":
        is_masked = batch.labels != UNLABELLED
        assert (batch.x[is_masked] == 210).all()
        assert labelled.sum() < batch.mask_BT.sum()
    expected = [define_loss(logits_BTC[row], batch.labels[row]) for row in range(B)]
    torch.testing.assert_close(sample_losses(logits_BTC, batch.labels), torch.stack(expected))


def test_a_decoder_gets_what_precedes_its_labels() -> None:
    model, batch = make("seq2seq-lm", "tiny-t5", padding=0.3)

    assert len(batch.inputs) == 3
    assert torch.equal(
        batch.decoder_BT[:, 1:],
        batch.labels[:, :-1].where(batch.labels[:, :-1] != UNLABELLED, batch.decoder_BT[:, 1:]),
    )
    assert model(*batch.inputs).shape == (B, T, 211)
    others = batch.map(lambda one: one[:1])
    torch.testing.assert_close(model(*others.inputs)[0], model(*batch.inputs)[0])


def test_images_have_the_model_s_channels_and_the_experiment_s_dtype() -> None:
    for name, channels, dtype in (("opacus-cnn", 1, "float64"), ("vit-b16", 3, "float32")):
        experiment = make_experiment(
            model=name, seq_len=None, image_size=32, batch_size=B, dtype=dtype
        )
        model = build_model(experiment, is_reduced=True)
        batch = make_batch(model, torch.device("cpu"), experiment)

        assert batch.x.shape == (B, channels, 32, 32)
        assert batch.x.dtype is getattr(torch, dtype)
        assert batch.labels.max() < (10 if name == "opacus-cnn" else 5)
        assert batch.inputs == (batch.x,)


def test_a_decoder_that_classifies_knows_its_padding() -> None:
    """Its class is that of the last token that is no padding, which may not matter."""
    model, batch = make("sequence-classification", "tiny-llama", padding=0.5)
    alone = [
        model(batch.x[row : row + 1, :n], batch.mask_BT[row : row + 1, :n])
        for row, n in enumerate(batch.mask_BT.sum(1))
    ]

    torch.testing.assert_close(torch.cat(alone), model(*batch.inputs))


def test_roberta_makes_positions_of_its_own() -> None:
    """They begin after those of padding, and one may not depend on what another sample holds."""
    model, batch = make("sequence-classification", "tiny-roberta")
    library = model.model(input_ids=batch.x, attention_mask=batch.mask_BT).logits

    torch.testing.assert_close(model(*batch.inputs), library)


def test_a_model_without_classes_is_refused() -> None:
    experiment = make_experiment(model="x", image_size=8, seq_len=None)
    with pytest.raises(UnsupportedError, match=r"no torch.nn.Linear, and the last one gives"):
        make_batch(torch.nn.Conv2d(1, 1, 1), torch.device("cpu"), experiment)
