"""Every byte at the peak has its layer, by answers that can be worked out by hand."""

from collections import Counter

import pytest
from memory_steps import B, D, P, T, V, at_peak, keep_once

from dpprof.experiments.records.step_costs import AtPeak, Holdings
from dpprof.predict.memory.summary import _at_peak

LAYERS = {
    "token_embedding": V * D,
    "position_embedding": T * D,
    "head": D * V,
    "norm": 2 * D,
    **{f"blocks.{block}.attention_norm": 2 * D for block in range(2)},
    **{f"blocks.{block}.attention.qkv": 3 * D * D + 3 * D for block in range(2)},
    **{f"blocks.{block}.attention.out": D * D + D for block in range(2)},
    **{f"blocks.{block}.mlp_norm": 2 * D for block in range(2)},
    **{f"blocks.{block}.mlp.0": 4 * D * D + 4 * D for block in range(2)},
    **{f"blocks.{block}.mlp.2": 4 * D * D + D for block in range(2)},
}
"""Parameters of each layer of the small model."""


def rows_of(method: str) -> list[tuple]:
    held = _at_peak(keep_once(method)).holdings
    columns = (held.component, held.layer, held.op, held.phase, held.bytes, held.storages)
    return list(zip(*columns, strict=True))


def by_layer(method: str, component: str) -> Counter:
    sums = Counter()
    for held, layer, _, _, size, _ in rows_of(method):
        if held == component:
            sums[layer] += size
    return sums


@pytest.mark.parametrize("method", ["standard", "opacus-hooks", "opacus-ghost", "flash-bk"])
def test_rows_sum_to_the_peak_component_by_component(method) -> None:
    sums = Counter()
    for component, _, _, _, size, _ in rows_of(method):
        sums[component] += size

    assert sums == {name: size for name, size in at_peak(keep_once(method)).items() if size}
    assert sums.total() == keep_once(method).peak_bytes
    assert sum(LAYERS.values()) == P


@pytest.mark.parametrize("method", ["standard", "opacus-hooks", "opacus-functorch", "flash-bk"])
def test_parameters_and_optimizer_state_stand_with_their_layer(method) -> None:
    assert by_layer(method, "parameters") == {name: 4 * n for name, n in LAYERS.items()}
    # Adam keeps two values for each parameter, and a count of steps for each tensor.
    states = by_layer(method, "optimizer_state")
    assert states["head"] == 2 * 4 * D * V + 4
    assert states["blocks.1.mlp.0"] == 2 * 4 * (4 * D * D + 4 * D) + 2 * 4
    assert set(states) == set(LAYERS)


def test_gradients_stand_with_their_layer_and_what_no_module_made_has_none() -> None:
    """Opacus leaves gradients filled with zeros, so all are there at the peak in backward.

    That peak is in the head's backward: the product, and its copy in the making.
    """
    assert by_layer("opacus-hooks", "gradients") == {name: 4 * n for name, n in LAYERS.items()}
    assert by_layer("opacus-hooks", "per_sample_gradients") == {"head": 2 * B * 4 * D * V}
    assert by_layer("standard", "inputs") == {None: 2 * B * T * 8}


def test_the_largest_stand_first_and_storages_are_counted() -> None:
    rows = rows_of("standard")
    sizes = [size for *_, size, _ in rows]
    [logits] = [row for row in rows if row[:3] == ("logits_and_loss", None, "_log_softmax")]
    [state] = [row for row in rows if row[:2] == ("optimizer_state", "head") and row[-2] > 4]

    assert sizes == sorted(sizes, reverse=True)
    assert logits[3:] == ("forward", B * T * V * 4, 1)
    assert state[2:] == ("zeros_like", "step", 2 * 4 * D * V, 2)


HEAD = {"component": ["parameters"], "layer": ["head"], "op": ["empty"], "phase": ["setup"]}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bytes": [7]}, "must sum to the components' bytes"),
        ({"component": ["gradients"]}, "must sum to the components' bytes"),
        ({"bytes": [8, 0]}, "must be equally long"),
        ({"layer": []}, "must be equally long"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(wrong, sentence) -> None:
    stated = {"phase": "backward", "module": None, "op": None, "largest": []}
    stated |= {"components": {"parameters": 8}}
    good = HEAD | {"bytes": [8], "storages": [1]}

    assert isinstance(AtPeak.model_validate(stated | {"holdings": good}).holdings, Holdings)
    with pytest.raises(ValueError, match=sentence):
        AtPeak.model_validate(stated | {"holdings": good | wrong})
