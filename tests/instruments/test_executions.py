"""Steps that run as CUDA graphs or compiled: what is refused, measured and predicted."""

import pytest
import torch
from factory import make_experiment
from simulated_graphs import SimulatedGraphs, simulated_graphs

from dpprof.experiments.config import registry
from dpprof.measure.instruments import clean
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.setup import import_method, set_up

GPU = {"device": "cuda", "target": "h100", "dtype": "bfloat16"}
SMALL = {"vocab_size": 64, "d_model": 32, "layers": 4, "heads": 4}


def _ignore(*_) -> None:
    pass


def parameters(training) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training.step.module.parameters()])


@pytest.mark.parametrize("method", ["standard", "flash-bk", "flash", "per-layer"])
def test_a_captured_method_trains_as_its_steps_do(method, monkeypatch) -> None:
    options = {"optimizer": "sgd", "batch_size": 3, "noise_multiplier": 0.0}
    experiment = make_experiment(method=method, **options)
    with simulated_graphs(monkeypatch):
        captured, plain = (
            set_up(experiment, import_method(experiment), torch.device("cpu"), _ignore)
            for _ in range(2)
        )
        state = torch.get_rng_state()
        run = captured.step.capture(captured.batch)
        graphs, steps = (1, 2) if method == "standard" else (2, 1)  # steps to warm up
        for _ in range(3):
            run()
        torch.set_rng_state(state)
        for _ in range(3 + steps):
            plain.step.run(plain.batch, _ignore)

    assert SimulatedGraphs.captured == graphs
    torch.testing.assert_close(parameters(captured), parameters(plain), rtol=1e-4, atol=1e-6)


def test_a_graph_is_measured_as_a_whole(monkeypatch) -> None:
    eager = make_experiment(method="flash-bk", warmup_steps=2, timed_steps=3)
    experiment = eager.model_copy(update={"execution": "graph"})
    with simulated_graphs(monkeypatch):
        measured = clean.measure(experiment, _ignore)

    assert SimulatedGraphs.captured == 2  # a part and the step; noise where a kernel draws it
    assert len(measured.time.step_s) == 3
    assert measured.samplers is not None
    assert "after_backward" not in {one.name for one in measured.memory.snapshots}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", "flash-bk", "flash"])  # one finds the other's code
@torch._functorch.config.patch("donated_buffer", True)
def test_a_compiled_step_is_measured(method) -> None:
    measured = clean.measure(make_experiment(method=method, execution="compiled"), _ignore)

    assert measured.time.median_s > 0


@pytest.mark.parametrize("method", ["standard", "flash-bk"])
def test_a_predicted_graph_waits_for_no_host_and_has_its_own_pool(method) -> None:
    fields = {"method": method, "model": SMALL, "batch_size": 4, "seq_len": 64, **GPU}
    eager, graph = (
        estimate(make_experiment(**fields, execution=one), _ignore) for one in ("eager", "graph")
    )

    assert graph.time.predicted_step_s.waiting_share == pytest.approx(0, abs=1e-9)
    assert graph.time.predicted_step_s.median < eager.time.predicted_step_s.median / 2
    assert graph.compute.executed_flops == eager.compute.executed_flops
    assert "is captured" in graph.memory.assumed["graph"]
    assert graph.memory.allocator.settled


def test_a_fused_optimizer_reads_and_writes_each_number_once() -> None:
    fields = {"model": SMALL, **GPU}
    fused, usual = (
        estimate(make_experiment(**fields, optimizer=one), _ignore)
        for one in ("adamw-fused", "adamw")
    )
    moved = [sum(one.io.by_phase["step"].model_dump().values()) for one in (fused, usual)]

    # Parameters and two moments are read and written, gradients read.
    assert moved[0] == pytest.approx(7 * 4 * fused.model.parameters_total, rel=0.01)
    assert moved[1] > 2 * moved[0]
    assert fused.io.launches < usual.io.launches


@pytest.mark.parametrize(
    ("fields", "instrument", "why"),
    [
        ({"execution": "compiled", **GPU}, "estimate", "what a compiler makes of a step is not"),
        ({"execution": "compiled"}, "phases", "looks into steps that Python runs"),
        ({"execution": "graph", **GPU}, "memory", "looks into steps that Python runs"),
        ({"execution": "graph", **GPU}, "capacity", None),
        ({"execution": "compiled"}, "clean", None),
    ],
)
def test_what_no_instrument_can_do_is_said(fields, instrument, why) -> None:
    reason = registry.why_unsupported(make_experiment(**fields), instrument)

    assert reason is None if why is None else why in reason


def test_a_method_says_how_it_runs() -> None:
    experiment = make_experiment(method="opacus-ghost", execution="compiled")
    method = import_method(experiment)

    with pytest.raises(UnsupportedError, match="opacus-ghost does not run with execution compiled"):
        set_up(experiment, method, torch.device("cpu"), _ignore)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["standard", "flash-bk", "flash", "per-layer"])
def test_a_graph_on_a_gpu_trains_as_its_steps_do(method) -> None:
    fields = {"method": method, "noise_multiplier": 0.0, "device": "cuda", "batch_size": 3}
    experiment = make_experiment(optimizer="adamw", **fields)
    cls, device = clean.open_experiment(experiment)
    captured, plain = (set_up(experiment, cls, device.torch_device, _ignore) for _ in range(2))
    run = captured.step.capture(captured.batch)
    for _ in range(3):
        run()
    for _ in range(3 + (2 if method == "standard" else 1)):
        plain.step.run(plain.batch, _ignore)

    torch.testing.assert_close(parameters(captured), parameters(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["standard", "flash-bk", "flash"])
@pytest.mark.parametrize("execution", ["graph", "compiled"])
def test_executions_are_measured_on_a_gpu(method, execution) -> None:
    fields = {"method": method, "device": "cuda", "execution": execution, "dtype": "bfloat16"}
    measured = clean.measure(make_experiment(**fields, warmup_steps=3, timed_steps=3), _ignore)

    assert len(measured.time.step_s) == 3
