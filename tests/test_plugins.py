"""Another package's method and model: installed, measured, and told apart when it is broken."""

import json
from pathlib import Path

import pytest
import torch
from checkout import TABLES, copy_checkout
from example_package import install_example
from factory import make_experiment
from fresh_process import run_captured, run_fresh
from memory_steps import record_and_estimate
from scripts import spell
from snapshots import assert_sentences
from torch import Tensor, nn

from dpprof.experiments.config import registry
from dpprof.experiments.records.verdict import judge, name_holes
from dpprof.measure.verification.verify import verify
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.microbatch import Microbatch
from dpprof.subjects.methods.training_step import Batch, TrainingStep
from dpprof.subjects.models.build import build_model

B, T = 3, 16
FIELDS = {"model": "example-mixer", "method": "example-vmap", "batch_size": B, "seq_len": T}
P = 100 * 32 + 2 * 32 + (T * T + T) + (32 * 100 + 100)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    return install_example(tmp_path_factory.mktemp("example"))


def test_an_installed_package_is_measured(installed, tmp_path) -> None:
    """By a script of the workflow, without Snakemake and in any folder."""
    fields = FIELDS | {"warmup_steps": 2, "timed_steps": 1, "device": "cpu"}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    command = spell("profile", *given, "--output=x.json")
    done = run_captured(command, tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert "ok after" in done.stderr
    [output] = tmp_path.iterdir()
    result = json.loads(output.read_text())

    assert (output.name, result["outcome"]) == ("x.json", "ok")
    assert result["model"]["parameters_total"] == P
    assert len(result["time"]["step_s"]) == 1


@pytest.mark.workflow
def test_a_config_may_name_an_installed_packages_method_and_model(installed, tmp_path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    checkout.environment = {"PYTHONPATH": str(installed)}
    (checkout.path / "config" / "config.yaml").write_text("""
sweeps:
  one: {model: example-mixer, method: example-vmap, batch_size: 2, seq_len: 4, device: cpu}
""")
    planned = checkout.planned(TABLES)

    assert planned["profile"][0].startswith("example-mixer-example-vmap-b2-t4-")
    assert planned["verify"] == ["example-mixer-example-vmap.json"]


@pytest.fixture
def example(installed, monkeypatch) -> type[TrainingStep]:
    """The example's method, loaded by its name in this process."""
    monkeypatch.syspath_prepend(str(installed))
    registry._entries.cache_clear()
    yield registry.load("methods", "example-vmap")
    registry._entries.cache_clear()


def test_its_memory_is_accounted_for_and_predicted(example) -> None:
    recorded, guess = record_and_estimate(make_experiment(**FIELDS))

    assert recorded.memory.at_peak.components["per_sample_gradients"] == B * P * 4
    assert recorded.memory.at_peak.components["unattributed"] == 0
    assert recorded.memory.attribution.evidence["phase"] == 0
    assert guess.memory.at_peak == recorded.memory.at_peak


def clipped(method: type[TrainingStep], model: str | dict, bound: float, noise: float) -> Tensor:
    fields = {"model": model, "batch_size": B, "seq_len": T, "attention": "eager"}
    experiment = make_experiment(**fields, max_grad_norm=bound, noise_multiplier=noise)
    torch.manual_seed(0)
    step = method(build_model(experiment).double(), experiment)
    step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=1.0))
    tokens = torch.randint(16, (B, T + 1))
    step.compute_gradient(Batch(tokens[:, :-1], tokens[:, 1:]), lambda _: None)
    return torch.cat([p.grad.flatten() for p in step.module.parameters()])


@pytest.mark.parametrize("model", ["example-mixer", make_experiment().model.model_dump()], ids=str)
@pytest.mark.parametrize("bound", [1e-2, 1.0, 1e3])
def test_the_examples_gradient_equals_microbatch(example, model, bound) -> None:
    torch.testing.assert_close(
        clipped(example, model, bound, 0.0),
        clipped(Microbatch, model, bound, 0.0),
        rtol=1e-9,
        atol=1e-12,
    )


def test_the_examples_noise_has_the_standard_deviation_asked_for(example) -> None:
    both = [clipped(example, "example-mixer", 0.5, noise) for noise in (0.0, 3.0)]

    # From 6,836 values: one standard error is 0.9 %.
    assert (both[1] - both[0]).std().item() == pytest.approx(3.0 * 0.5 / B, rel=0.05)


def test_the_example_is_verified_and_has_no_holes(example) -> None:
    found = verify("example-mixer", "example-vmap")

    assert judge(found.cases) == (True, None)
    assert found.mechanism == "flat clipping"
    assert name_holes(found.cases) == []
    by = {one.scenario: one.outcome for one in found.cases}
    assert [by[name] for name in ("thawed later", "non-finite", "accumulated")] == ["passed"] * 3


def test_the_example_refuses_a_model_whose_buffers_mix_samples(example) -> None:
    with pytest.raises(UnsupportedError, match="has buffers, which samples would share"):
        example(nn.BatchNorm1d(3), make_experiment())


CASES = [
    *(f"method={name}" for name in ("no-module", "no-attribute", "no-step", "no-library", "picky")),
    *(f"model={name}" for name in ("no-module", "no-model", "no-function", "no-embedding")),
    "target=no-target",
]


def test_what_is_broken_is_planned_without_torch_and_told_in_one_sentence() -> None:
    code = """
import json, sys, tempfile
from factory import make_experiment
from dpprof.experiments.planning.code_digest import code_digest
experiments = {}
for case in sys.argv[1:]:
    key, _, name = case.partition("=")
    others = {"device": "cuda"} if key == "target" else {}
    experiments[case] = make_experiment(**{key: name}, **others)
    code_digest("clean", experiments[case])
assert "torch" not in sys.modules and "broken" not in sys.modules
from dpprof.experiments.launch.worker_report import PhaseMark
from dpprof.experiments.launch.worker import run
file = tempfile.TemporaryFile()
mark = PhaseMark(file.fileno())
told = {}
for case, experiment in experiments.items():
    report = run(experiment, "estimate" if case.startswith("target") else "clean", mark)
    told[case] = report.outcome, report.error.kind, report.error.message
print("TOLD", json.dumps(told))
"""
    said = run_fresh(code, *CASES, plugin=Path(__file__).parent / "plugin" / "broken").splitlines()[
        -1
    ]
    told = json.loads(said.removeprefix("TOLD "))

    assert_sentences("plugin/broken", lambda case: told[case][-1], CASES)
    refused = {case for case, (outcome, *_) in told.items() if outcome == "unsupported"}
    assert refused == {"method=picky", "model=no-embedding"}
    assert {(outcome, kind) for outcome, kind, _ in told.values()} == {
        ("unsupported", "UnsupportedError"),
        ("crashed", "EntryPointError"),
    }
