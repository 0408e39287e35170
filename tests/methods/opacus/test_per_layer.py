"""Every parameter is clipped to a bound of its own, and the whole sum has sensitivity C."""

import math
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from steps import gradient, prepare, sample_gradients
from torch.utils.data import DataLoader, TensorDataset

from dpprof.spec import registry

METHOD = "opacus-per-layer"


@pytest.mark.parametrize("bound", [1e-2, 3.0, 1e4])
def test_gradient_is_each_parameters_clipped_to_its_share_of_the_bound(bound) -> None:
    fields = {"batch_size": 5, "dtype": "float64", "max_grad_norm": bound, "noise_multiplier": 0}
    per_parameter = sample_gradients(**fields)
    share = bound / math.sqrt(len(per_parameter))
    expected = []
    for gradients in per_parameter:
        factors = [min(1.0, share / (float(one.norm()) + 1e-6)) for one in gradients]
        expected.append(sum(f * one for f, one in zip(factors, gradients, strict=True)) / 5)

    torch.testing.assert_close(
        gradient(METHOD, **fields), torch.cat(expected), rtol=1e-9, atol=1e-12
    )


def test_a_sample_all_of_whose_parameters_are_clipped_contributes_the_bound() -> None:
    fields = {"batch_size": 1, "dtype": "float64", "noise_multiplier": 0, "max_grad_norm": 1e-3}

    assert gradient(METHOD, **fields).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_step_is_that_of_opacus_privacy_engine() -> None:
    fields = {"batch_size": 4, "dtype": "float64", "max_grad_norm": 0.1}
    apart, batch = prepare(METHOD, **fields)
    plain, _ = prepare("standard", **fields)
    count = len(list(plain.module.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that its random numbers are not for secrets
        module, optimizer, _ = PrivacyEngine().make_private(
            module=plain.module.train(),
            optimizer=plain.optimizer,
            data_loader=DataLoader(TensorDataset(*batch), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=[0.1 / math.sqrt(count)] * count,
            clipping="per_layer",
            poisson_sampling=False,
        )

    torch.manual_seed(1)
    apart.run(batch, lambda _: None)
    torch.manual_seed(1)
    logits = module(batch.tokens_BT).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, batch.labels_BT.flatten()).backward()
    optimizer.step()

    for one, other in zip(apart.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_autocast_is_refused_in_one_sentence() -> None:
    with pytest.raises(registry.UnsupportedError, match="per-layer optimizer does not work under"):
        prepare(METHOD, dtype="bfloat16")


def test_it_is_no_flat_clipping() -> None:
    fields = {"batch_size": 5, "dtype": "float64", "noise_multiplier": 0, "max_grad_norm": 0.1}
    flat, per_layer = gradient("microbatch", **fields), gradient(METHOD, **fields)

    assert torch.nn.functional.cosine_similarity(flat, per_layer, dim=0) < 0.99
