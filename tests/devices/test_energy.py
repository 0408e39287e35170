"""Energy by a counter that is not there: known strides, known answers."""

import pynvml
import pytest

from dpprof.measure.devices import cuda
from dpprof.measure.devices.cpu import Cpu
from dpprof.measure.devices.cuda import Cuda
from dpprof.measure.devices.device import NoEnergyError
from dpprof.system.hardware import Gpu


class Counter:
    """NVML's counter of a GPU that draws 500 W, and a clock; a step takes 0.4 s."""

    now_s, watts, step_s = 100.0, 500.0, 0.4

    def read_mj(self, _handle: object) -> int:
        return int(self.now_s * self.watts * 1e3)

    def step(self) -> None:
        self.now_s += self.step_s


@pytest.fixture
def counter(monkeypatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(cuda, "visible_gpus", lambda: [Gpu("GPU-1", "some GPU", 1)])
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: counter.now_s)
    monkeypatch.setattr(cuda.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", counter.read_mj)
    return counter


def test_joules_of_a_step_are_power_times_its_time(counter) -> None:
    found = Cuda().energy(counter.step, 0.4)

    assert found.joules_per_step == pytest.approx(500 * 0.4)
    assert (found.steps, found.window_s) == (5, pytest.approx(2.0))
    assert "nvmlDeviceGetTotalEnergyConsumption" in found.source


def refuse(_handle: object) -> int:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ((Counter, "watts", 0.0), "did not move"),
        ((Counter, "step_s", 0.01), r"0.1 s is too short"),
        ((pynvml, "nvmlDeviceGetTotalEnergyConsumption", refuse), "cannot read the energy"),
        ((cuda, "visible_gpus", list), "NVML shows no GPU"),
    ],
)
def test_without_a_figure_the_reason_is_given(broken, why, counter, monkeypatch) -> None:
    monkeypatch.setattr(*broken)

    with pytest.raises(NoEnergyError, match=why):
        Cuda().energy(counter.step, 0.4)


def test_a_cpu_has_no_such_counter() -> None:
    with pytest.raises(NoEnergyError, match="this is a CPU"):
        Cpu().energy(lambda: None, 0.1)


@pytest.mark.gpu
def test_a_real_counter_moves() -> None:
    import torch  # noqa: PLC0415

    x = torch.randn(4096, 4096, device="cuda")
    torch.mm(x, x)
    (step_s,) = Cuda().time(lambda: [torch.mm(x, x) for _ in range(100)], 1)
    found = Cuda().energy(lambda: torch.mm(x, x), step_s / 100)

    assert found.window_s >= cuda.WINDOW_S / 2
    assert 10 < found.joules_per_step * found.steps / found.window_s < 2000  # watts
