"""A function of the user's own that builds a model, or a model with its loss and its batch."""

import sys

import pytest
import torch
from factory import make_experiment
from fresh_process import run_captured
from memory_steps import record_and_estimate
from scripts import ROOT, call
from torch import nn
from torch.nn import functional

import dpprof
from dpprof.ask.questions import naming
from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import read_spec
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.code_digest import code_digest
from dpprof.experiments.planning.planner import make_plan
from dpprof.experiments.records.verdict import judge, name_holes
from dpprof.measure.verification.verify import verify
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.microbatch import Microbatch
from dpprof.subjects.models.build import build_model
from dpprof.system.files import canonical_json

CODE = """
import torch
from torch import nn
from torch.nn import functional


def build(experiment):
    count = experiment.batch_size
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    def losses_of(x, weight, y):
        return weight * functional.cross_entropy(model(x), y, reduction="none")

    return model, losses_of, (torch.randn(count, 20), torch.rand(count), torch.randint(5, (count,)))


def build_mixer(experiment):
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
"""
SLOW = ("flash", "microbatch", "opacus-hooks", "opacus-ew", "opacus-functorch")
B, P = 8, 20 * 64 + 64 + 64 * 5 + 5
SIZES = {"batch_size": B, "seq_len": 1, "target": "cpu"}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The code as a module in the working folder."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield registry.load("models", "mine:build")
    del sys.modules["mine"]


@pytest.mark.parametrize(
    "method", ["standard", "flash-bk", *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)]
)
def test_a_model_with_its_own_losses_is_predicted_to_the_byte(mine, method) -> None:
    experiment = make_experiment(model="mine:build", method=method, batch_size=B, seq_len=1)
    recorded, guess = record_and_estimate(experiment)

    assert guess.memory.at_peak == recorded.memory.at_peak
    assert recorded.memory.at_peak.components["unattributed"] == 0
    assert guess.model.parameters_total == P
    if method == "standard":  # 2 FLOPs forward, 4 backward, without the gradient of the input
        assert guess.compute.executed_flops == B * (6 * (20 * 64 + 64 * 5) - 2 * 20 * 64)


def test_its_clipped_gradient_is_the_definition(mine) -> None:
    found = verify("mine:build", "flash-bk")

    assert judge(found.cases)[0]
    assert name_holes(found.cases) == []
    passed = {one.scenario for one in found.cases if one.outcome == "passed"}
    assert passed >= {"plain", "frozen", "frozen later", "non-finite", "empty"}


def test_its_gradient_by_microbatch_is_that_of_its_own_loss(mine) -> None:
    experiment = make_experiment(
        model="mine:build", batch_size=B, seq_len=1, noise_multiplier=0.0, max_grad_norm=1e9
    )
    torch.manual_seed(0)
    module = build_model(experiment)
    step = Microbatch(module, experiment)
    step.attach_optimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    batch = make_batch(module, torch.device("cpu"), experiment)
    step.compute_gradient(batch, lambda _: None)
    x, weight, y = batch.inputs
    loss = (weight * functional.cross_entropy(module.model(x), y, reduction="none")).mean()
    expected = torch.autograd.grad(loss, list(module.parameters()))

    torch.testing.assert_close([p.grad for p in module.parameters()], list(expected))


def test_a_function_of_this_process_is_predicted_here_as_its_name_is_elsewhere(
    mine, tmp_path
) -> None:
    torch.manual_seed(5)
    here = dpprof.estimate(mine, "flash-bk", **SIZES)
    drawn = torch.rand(1)
    own = make_experiment(model="mine:build", method="flash-bk", **SIZES)
    named = estimate(own, lambda _: None)

    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the prediction has seeded and drawn nothing
    for field in ("memory", "compute", "io", "model", "norm_plan"):
        assert getattr(here.result, field) == getattr(named, field), field
    assert own.id.startswith("mine-build-flash-bk-b8-t1-")
    assert list((tmp_path / "results").rglob("*.json")) == []  # another may have its name tomorrow


def test_an_edited_function_is_predicted_anew(mine, tmp_path) -> None:
    experiment = make_experiment(model="mine:build")
    digests = []
    for width in ("64", "64", "128"):
        (tmp_path / "mine.py").write_text(CODE.replace("64", width))
        with naming({}):  # as each question begins
            digests.append(code_digest("estimate", experiment))

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_a_script_without_a_guard_may_ask_for_several_methods(tmp_path) -> None:
    """Processes that multiprocessing starts run the script of their parent again, as a rule."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\nimport dpprof\n"
        "dimensions = dict(vocab_size=16, d_model=8, layers=1, heads=2)\n"
        "where = dict(target='l4', seq_len=8, memory_limit_bytes='1MiB')\n"
        "asked = dpprof.advise(dimensions, methods=['standard', 'flash'], **where)\n"
        "print([one.verdict for one in asked.advices[0].options])\n"
    )
    done = run_captured([sys.executable, script], tmp_path, PYTHONPATH=str(ROOT / "src"))

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["once", "['does not fit', 'does not fit']"]


def return_two(_):
    return nn.Linear(1, 1), torch.ones(1)


def return_mean(experiment):
    model = nn.Linear(3, 3)
    return model, lambda x: model(x).mean(), torch.randn(experiment.batch_size, 3)


def return_few(_):
    model = nn.Linear(3, 1)
    return model, lambda x: model(x)[:, 0], torch.randn(2, 3)


WRONG = {
    "two": (return_two, "returned (Linear, Tensor), and the three are a torch.nn.Module"),
    "mean": (return_mean, "the loss has the shape () for 8 samples; return one loss for each"),
    "few": (return_few, "the function's batch has 2 samples, and 8 are asked for"),
    "nothing": (lambda _: None, "returned NoneType and not a torch.nn.Module"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_returns_something_else_is_refused_in_a_sentence(case, tmp_path) -> None:
    build, why = WRONG[case]
    with registry.lent(build) as name:
        experiment = make_experiment(model=name, batch_size=B, seq_len=1)
        with pytest.raises((registry.EntryPointError, UnsupportedError)) as refusal:
            record_and_estimate(experiment)

    assert why in str(refusal.value)


def test_no_file_names_code(mine, tmp_path) -> None:
    runs_no_code = "is not allowed; a file runs no code; give it on the command line"
    sweep = {"method": "flash", "batch_size": 1, "seq_len": 1, "device": "cpu"}
    for key, grids in {
        "sweeps.one": {"one": sweep | {"model": ["tiny", "mine:build"]}},
        "defaults": {"one": sweep},
    }.items():
        config = {"sweeps": grids, "defaults": {"model": "mine:build"}}
        config = config if key == "defaults" else {"sweeps": grids}
        with pytest.raises(InputError) as refusal:
            make_plan(config)
        assert f"{key}.model: 'mine:build' {runs_no_code}" in str(refusal.value)
    experiment = make_experiment(model="mine:build")
    spec = tmp_path / f"{experiment.id}.json"
    spec.write_text(canonical_json(experiment.model_dump(mode="json")))
    with pytest.raises(InputError, match="a file runs no code"):
        read_spec(spec)


def test_code_that_is_not_there_is_refused(mine, tmp_path) -> None:
    done = call("estimate", "--model=yours:build", "--method=flash", cwd=tmp_path)

    assert done.returncode == 1
    assert "--batch-size, --seq-len" in done.stderr
    options = ["--method=flash", "--batch-size=1", "--seq-len=1", "--target=l4"]
    done = call("estimate", "--model=yours:build", *options, cwd=tmp_path)
    assert done.stderr == (
        "error: --model: 'yours:build' is not allowed; there is no such module, here or installed\n"
    )
