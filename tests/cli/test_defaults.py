"""What questions take for granted: settings by GPU, and the GPU of this machine."""

import json

import pytest
from factory import make_capacity
from fake_gpus import GIB, fake_driver
from scripts import ASKED, call

from dpprof.ask import defaults
from dpprof.ask.capacities import list_experiments
from dpprof.ask.defaults import add_defaults, find_target
from dpprof.ask.estimate import estimate
from dpprof.experiments.config import registry
from dpprof.experiments.config.validation import InputError
from dpprof.system import hardware

IN_16_BITS = {"optimizer": "adamw-fused", "dtype": "bfloat16"}
ONE_SPEED = {"memory_bytes": "1GiB", "flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e11}
SETTINGS = {
    "an H200": ("h200", IN_16_BITS),
    "a T4": ("t4", {"optimizer": "adamw-fused", "dtype": "float16", "loss_scale": 65_536}),
    "a V100": ("v100", {"optimizer": "adamw-fused", "dtype": "float16", "loss_scale": 65_536}),
    "a mapping": (ONE_SPEED, IN_16_BITS),
    "a mapping of an old card": (
        ONE_SPEED | {"compute_capability": "7.0"},
        {"optimizer": "adamw-fused", "dtype": "float16", "loss_scale": 65_536},
    ),
    "a mapping in float32 alone": (
        ONE_SPEED | {"flops_per_s": {"float32": 1e12}},
        {"optimizer": "adamw-fused"},
    ),
    "a bad mapping": ({"memory_bytes": 0}, {}),
    "a processor": ("cpu", {}),
    "none": (None, {}),
    "no target": ("h300", {}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_those_of_the_gpu(case) -> None:
    target, expected = SETTINGS[case]

    assert add_defaults({"target": target, "seq_len": 8}) == {
        "target": target,
        "seq_len": 8,
        **expected,
    }


def test_what_is_given_stays() -> None:
    given = {"target": "t4", "dtype": "float32", "optimizer": "sgd", "execution": "graph"}

    assert add_defaults(given) == given


@pytest.mark.parametrize(
    ("given", "execution"),
    [
        ({"method": "flash-bk"}, "graph"),
        ({"method": "flash-bk", "execution": "eager"}, "eager"),
        ({"method": "standard"}, None),
        ({"method": "flash-bk", "parallel": "kind=ddp,world_size=2"}, None),
        ({"method": "flash-bk", "optimizer": "adamw-8bit"}, None),
        ({"method": "flash-bk", "target": "cpu"}, None),
        ({"method": "flash-bk", "noise_strategy": "banded-8"}, None),
        ({"method": "flash-bk", "noise_strategy": "independent"}, "graph"),
    ],
)
def test_a_method_that_is_captured_is_asked_about_as_a_graph(given, execution, monkeypatch) -> None:
    monkeypatch.setattr(defaults, "CAPTURED", ("flash-bk",))

    assert add_defaults({"target": "h200"} | given).get("execution") == execution


def test_a_question_has_them_and_its_text_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    [asked] = list_experiments(
        {"model": "tiny", "seq_len": 8, "target": json.dumps(ONE_SPEED)}, ["flash"]
    )
    assert (asked.dtype, asked.optimizer, asked.execution) == ("bfloat16", "adamw-fused", "graph")

    sizes = {"batch_size": 1, "seq_len": 4}
    model = {"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}
    told = str(estimate(model, "flash", target="cpu", **sizes))
    assert told.startswith("flash, 1 x 4 tokens, float32, adamw, eager\n")


@pytest.fixture
def see(monkeypatch):
    """Show GPUs to this process."""
    gpus: list[dict] = []
    monkeypatch.setattr(hardware, "pynvml", fake_driver(lambda: gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def show(name, used_bytes):
        gpus[:] = [{"uuid": "GPU-0", "name": name, "memory_bytes": 80 * GIB, "load": 0}]
        gpus[0]["used_bytes"] = used_bytes

    return show


def test_without_a_target_the_gpu_here_is_asked_about(see) -> None:
    room = registry.load("targets", "h100").memory_bytes
    see("NVIDIA H100 80GB HBM3", 500 * 2**20)  # the driver's own

    assert find_target() == {"target": "h100"}
    see("NVIDIA H100 80GB HBM3", 10 * GIB)
    found = find_target()
    assert found["target"] == "h100"
    assert 0 <= room - 10 * GIB - found["memory_limit_bytes"] < GIB / 4
    see("NVIDIA H100 80GB HBM3", 10 * GIB + 2**20)
    assert find_target() == found or room % (GIB // 4) < 2**20  # what is kept answers it again


def test_the_answer_names_the_memory_that_others_leave(see, tmp_path, keep_capacities) -> None:
    see("NVIDIA L4", 20 * GIB)
    left = 5 * GIB // 4
    known = [*ASKED, "--target", "l4", "--memory-limit-bytes", str(left)]
    (tmp_path / "results" / "verify").mkdir(parents=True)
    keep_capacities(tmp_path, known, lambda _: make_capacity(1.0, budget_bytes=left))

    done = call("advise", *ASKED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ", on l4 with 1.25 GiB." in done.stdout.replace("\n  ", " ")


def test_a_gpu_without_figures_is_refused_in_a_sentence(see) -> None:
    see("NVIDIA GeForce RTX 3060", 0)
    with pytest.raises(
        InputError, match="no target is like the GPU here, NVIDIA GeForce RTX 3060; "
    ):
        find_target()


def test_without_a_gpu_three_common_targets_are_named(monkeypatch) -> None:
    monkeypatch.setattr(defaults, "visible_gpus", list)
    with pytest.raises(
        InputError, match="no GPU here; give one, such as rtx-4090, a100 or h100, or"
    ):
        find_target()
    common = ("rtx-4090", "a100", "h100")
    assert set(common) < set(registry.names("targets"))
