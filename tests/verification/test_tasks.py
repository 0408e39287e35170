"""Methods on models of other tasks, compared with the references and tried for their guarantees."""

import itertools

import pytest
from factory import make_experiment

from dpprof.experiments.config import registry
from dpprof.experiments.config.tasks import OWN_IMAGE_SIZES
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.experiments.records.verdict import Scenario
from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.measure.verification.verify import verify_case

IMAGES = [name for name, size in OWN_IMAGE_SIZES.items() if size is not None]
TEXT = {
    f"{name} {task}": {"model": {"hf": f"{name}-base", "task": task}, "padding": 0.3}
    for name, task in itertools.product(
        ("bert", "roberta"), ("sequence-classification", "token-classification", "masked-lm")
    )
}
HUGGING_FACE = TEXT | {
    "t5": {"model": "hf:t5-base"},
    "vit": {"model": "hf:vit-base", "seq_len": None},
}
OWN = ("flash", "flash-bk", "microbatch", "standard")


def subject(name: str) -> str | StandIn:
    """Return what is verified: a name, or a small model with the layers of a real one."""
    if name in IMAGES:
        return name
    stand_in = StandIn.of(make_experiment(**HUGGING_FACE[name]))
    assert stand_in is not None
    return stand_in


def verify(name: str, method: str, scenario: Scenario = "plain"):
    batch_size = 16 if method == "opacus-adaptive" else 4
    with lift_float32():
        return verify_case(subject(name), method, "sdpa", batch_size, scenario)


QUICK = [
    ("opacus-cnn", "opacus-ghost"),
    ("vit-b16", "per-layer"),
    ("bert masked-lm", "flash-bk"),
]
SLOW = [
    *itertools.product(IMAGES, registry.names("methods")),
    *itertools.product(HUGGING_FACE, OWN),
    ("roberta sequence-classification", "opacus-hooks"),
]


@pytest.mark.parametrize(
    ("name", "method"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_method_has_the_gradient_of_the_references(name, method) -> None:
    case = verify(name, method)

    assert (case.outcome, case.reason) == ("passed", None)


@pytest.mark.parametrize("scenario", ["non-finite", "empty", "frozen later"])
@pytest.mark.parametrize("name", ["opacus-cnn", pytest.param("vit-b16", marks=pytest.mark.slow)])
def test_flash_bk_keeps_its_guarantee_on_images(name, scenario) -> None:
    case = verify(name, "flash-bk", scenario)

    assert (case.outcome, case.reason) == ("passed", None)


def test_a_class_cannot_be_ignored() -> None:
    case = verify("opacus-cnn", "flash-bk", "ignored labels")

    assert case.outcome == "unsupported"
    assert case.reason == "each sample has one label, which cannot be ignored"


def test_a_stand_in_keeps_the_task_and_is_named_after_it() -> None:
    stand_in = subject("bert masked-lm")

    assert stand_in.model.task == "masked-lm"
    assert stand_in.label.startswith("hf-bert-masked-lm-padded-")
    assert stand_in.label != subject("bert token-classification").label


def test_one_verdict_covers_every_size() -> None:
    sizes = [
        StandIn.of(make_experiment(model={"hf": name, "task": "masked-lm"}))
        for name in ("bert-base", "bert-large")
    ]

    assert sizes[0] == sizes[1]
    assert (sizes[0].model.config["num_hidden_layers"], sizes[0].model.config["vocab_size"]) == (
        2,
        13,
    )
