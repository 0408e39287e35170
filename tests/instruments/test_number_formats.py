"""What predictions say of number formats: what they cost on a card, and what a loop keeps."""

import pytest
import torch
from factory import make_experiment

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Measurement
from dpprof.predict import capacity
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.private.number_formats import KEPT_LOGITS
from dpprof.subjects.setup import import_method, set_up

T4 = {"device": "cuda", "target": "t4", "model": "small", "seq_len": 64, "method": "standard"}
B, T, V = 2, 64, 8000


def predict(**fields) -> tuple[Experiment, Measurement]:
    experiment = make_experiment(**T4 | {"batch_size": B} | fields)
    return experiment, estimate(experiment, lambda _: None)


def test_bfloat16_on_a_t4_says_what_it_costs_and_takes_longer() -> None:
    seconds = {}
    for dtype in ("bfloat16", "float16"):
        _, found = predict(dtype=dtype)
        seconds[dtype] = found.compute.roofline_step_s
        attention = [key for key in found.memory.assumed if key.startswith("attention")]
        if dtype == "bfloat16":
            assert found.memory.assumed["bfloat16"].endswith("use float16")
            assert attention == ["attention: math"]
        else:
            assert "float16" not in found.memory.assumed
            assert attention == ["attention: efficient"]
    assert seconds["bfloat16"] > seconds["float16"]


def test_kept_logits_are_alive_in_the_optimizers_step() -> None:
    """As computed, in 16 bits: 2 bytes each, from forward to the end of the step."""
    live = []
    for keep_logits in (False, True):
        _, found = predict(dtype="float16", keep_logits=keep_logits)
        timeline = found.memory.timeline
        at = timeline.phase.index("step")
        live.append(sum(line[at] for line in timeline.components.values()))
        assert found.memory.assumed.get("logits") == (KEPT_LOGITS if keep_logits else None)
    assert live[1] - live[0] == 2 * B * T * V


def test_a_card_with_less_memory_than_the_parameters_is_a_sentence() -> None:
    experiment = make_experiment(**T4 | {"model": "1b"}, memory_limit_bytes="1GiB")

    with pytest.raises(MemoryError, match=r"its parameters alone take 5,1\d\d MiB: store them in"):
        capacity.measure(experiment, lambda _: None)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16", "loss_scale": 2},
        {"dtype": "bfloat16", "parameters_dtype": "bfloat16", "trained_dtype": "bfloat16"},
    ],
)
def test_methods_that_sum_in_the_dtype_of_parameters_refuse_formats(fields) -> None:
    experiment = make_experiment(method="microbatch", **fields)

    with pytest.raises(UnsupportedError, match="knows neither loss_scale nor trained_dtype"):
        set_up(experiment, import_method(experiment), torch.device("cpu"), lambda *_: None)
