import datetime as dt
import json
import resource
import signal
import subprocess
import threading
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from children import wait_for
from documents import validate
from factory import make_experiment
from fake_gpus import profile_command

from dpprof.experiments.launch import supervisor
from dpprof.experiments.launch.supervisor import supervise
from dpprof.experiments.launch.worker_report import judge_death
from dpprof.experiments.records.result import read_result

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture
def once(monkeypatch) -> None:
    """Try once what may be tried again."""
    monkeypatch.setattr(supervisor, "MAX_ATTEMPTS", 1)


def supervised(tmp_path: Path, instrument: str = "clean", **fields):
    output = tmp_path / "result.json"
    log = tmp_path / "run.log"
    result = supervise(make_experiment(**fields), instrument, 0, output, log)
    assert read_result(output) == result
    return result, log.read_text()


def test_ok_with_a_model_of_another_package(tmp_path) -> None:
    result, log = supervised(tmp_path, model="test-linear", timed_steps=4, warmup_steps=2)

    assert (result.outcome, result.error, len(result.attempts)) == ("ok", None, 1)
    assert len(result.time.step_s) == 4
    assert len(result.time.warmup_step_s) == 2
    assert result.model.parameters_total == 11 * 3 + 3 * 11
    assert "attempt 1: ok" in log
    assert (result.verification, result.reasons["verification"]) == (None, "joined in tables")
    validate(json.loads((tmp_path / "result.json").read_text()), "result")


def test_oom_is_real_and_says_what_was_requested(tmp_path) -> None:
    # The first activation alone, 128 x 1,024 x 1,024 x 4 bytes, is 512 MiB.
    dimensions = {"vocab_size": 16, "d_model": 1024, "layers": 1, "heads": 1}
    result, log = supervised(
        tmp_path, model=dimensions, batch_size=128, seq_len=1024, memory_limit_bytes="2GiB"
    )

    assert (result.outcome, len(result.attempts)) == ("oom", 1)
    assert result.error.phase in {"setup", "forward"}
    assert result.error.requested_bytes >= 512 * 2**20
    assert "can't allocate memory" in result.error.message
    assert "Traceback" in log
    assert result.time is None


@pytest.mark.parametrize(
    ("method", "limit"),
    [
        ("standard", "150MiB"),
        pytest.param("opacus-ghost", "400MiB", marks=pytest.mark.slow),
        pytest.param("standard", "400MiB", marks=pytest.mark.slow),
        pytest.param("opacus-ghost", "150MiB", marks=pytest.mark.slow),
    ],
)
def test_a_limit_below_the_libraries_own_memory_is_oom_at_once(tmp_path, method, limit) -> None:
    result, _ = supervised(
        tmp_path, method=method, model="small", seq_len=64, memory_limit_bytes=limit, timeout_s=60
    )

    assert (result.outcome, len(result.attempts)) == ("oom", 1)


REPORTS = {
    "clean": ("unsupported", "UnsupportedError", "dtype tf32 is a mode of CUDA matrix products"),
    "test-refuses": ("unsupported", "UnsupportedError", "this instrument refuses every method"),
    "test-raises": ("crashed", "RuntimeError", "it broke: <script>alert(1)</script>"),
    "test-says-much": ("crashed", "RuntimeError", "y" * 2_000 + " ... (10,000,000 characters)"),
    "test-half-a-character": ("crashed", "RuntimeError", "half a \\ud800 character"),
}


@pytest.mark.parametrize("instrument", REPORTS)
def test_an_exception_is_a_failure_with_its_message(tmp_path, instrument, once) -> None:
    outcome, kind, message = REPORTS[instrument]
    dtype = "tf32" if instrument == "clean" else "float32"
    result, log = supervised(tmp_path, instrument, dtype=dtype)

    assert (result.outcome, result.error.kind) == (outcome, kind)
    assert result.error.message.startswith(message)
    assert ("Traceback" in log) == (outcome == "crashed")


def test_timeout_ends_the_worker_and_is_not_tried_again(tmp_path) -> None:
    result, _ = supervised(tmp_path, "test-sleeps", timeout_s=2)

    assert (result.outcome, len(result.attempts)) == ("timeout", 1)
    assert (result.error.kind, result.error.phase) == ("Timeout", "backward")
    assert result.attempts[0].wall_s >= 2


def test_killed_worker_is_tried_once_more_and_leaves_a_killed_result(tmp_path) -> None:
    result, _ = supervised(tmp_path, "test-dies")

    assert result.outcome == "killed"
    assert [attempt.outcome for attempt in result.attempts] == ["killed", "killed"]
    assert (result.error.signal, result.error.phase) == ("SIGKILL", "backward")
    assert result.error.log == str(tmp_path / "run.log")


def test_a_kill_that_does_not_return_ends_in_ok(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPPROF_TEST_MARKER", str(tmp_path / "died"))
    result, _ = supervised(tmp_path, "test-dies-once")

    assert [attempt.outcome for attempt in result.attempts] == ["killed", "ok"]
    assert (result.outcome, result.error) == ("ok", None)
    assert result.time is not None


def test_a_segfault_is_a_crash_with_its_signal_and_its_place(tmp_path) -> None:
    result, log = supervised(tmp_path, "test-segfaults")

    assert [attempt.outcome for attempt in result.attempts] == ["crashed", "crashed"]
    assert result.error.signal == "SIGSEGV"
    assert result.error.message.startswith("Segmentation fault, File ")
    assert result.error.message.endswith("in string_at")
    assert "Segmentation fault" in log


TERMINATE = "terminate called after throwing an instance of '{kind}'\n  what():  {what}\n{rest}"
FRAMES = "Exception raised from wait (most recent call first):\n" + "frame #0: 0x7 in x.so\n" * 60
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def test_an_aborts_message_is_what_was_said_before_it(tmp_path, monkeypatch, once) -> None:
    said = TERMINATE.format(kind="c10::Error", what=ILLEGAL, rest=FRAMES)
    monkeypatch.setenv("DPPROF_TEST_LAST_WORDS", said)
    result, _ = supervised(tmp_path, "test-aborts")

    assert (result.outcome, result.error.signal) == ("crashed", "SIGABRT")
    assert result.error.message == ILLEGAL


DUMP = "\nFatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File x\n"
NO_PLACE = "CUDA out of memory. Tried to allocate 2 GiB."
ENDS = {
    "a silent death": (3, "", "crashed", "exit code 3", "ended without output"),
    "last words": (7, "famous\nlast words\n", "crashed", "exit code 7", "last words"),
    "a signal without a name": (-40, "", "crashed", "signal 40", "ended without output"),
    "a line": (-6, "malloc(): corrupted\n" + DUMP, "crashed", "SIGABRT", "malloc(): corrupted"),
    "C++": (
        *(-6, TERMINATE.format(kind="E", what="no luck", rest="") + DUMP),
        *("crashed", "SIGABRT", "no luck"),
    ),
    "C++ without memory": (
        *(-6, TERMINATE.format(kind="std::bad_alloc", what="std::bad_alloc", rest=FRAMES) + DUMP),
        *("oom", "std::bad_alloc", "std::bad_alloc"),
    ),
    "CUDA without memory": (
        *(-6, TERMINATE.format(kind="c10::Error", what=NO_PLACE, rest=FRAMES) + DUMP),
        *("oom", "SIGABRT", NO_PLACE),
    ),
}


@pytest.mark.parametrize(
    ("returncode", "tail", "outcome", "kind", "message"), ENDS.values(), ids=ENDS
)
def test_how_a_process_died_is_told_by_its_status_and_its_last_words(
    returncode, tail, outcome, kind, message
) -> None:
    found, failure = judge_death(returncode, "backward", tail, limited=False)

    assert (found, failure.kind, failure.message) == (outcome, kind, message)
    assert failure.exit_code == (returncode if returncode > 0 else None)
    assert failure.phase == "backward"


def test_a_primitive_that_cannot_be_made_is_oom_under_a_limit_alone() -> None:
    said = "could not create a primitive\n"
    outcomes = [judge_death(1, "forward", said, limited=one)[0] for one in (True, False)]

    assert outcomes == ["oom", "crashed"]


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_flood_of_output_takes_neither_memory_nor_disk(tmp_path, once) -> None:
    before = peak_rss_bytes()
    result, log = supervised(tmp_path, "test-floods")

    assert peak_rss_bytes() - before < 60 * 2**20
    assert result.outcome == "crashed"
    assert len(result.error.message) < 3_000
    assert len(log) < 12 * 2**20
    assert "bytes of output are left out here" in log
    assert "the end" in log


def test_a_worker_that_hangs_after_it_has_finished_keeps_its_measurement(tmp_path) -> None:
    result, _ = supervised(tmp_path, "test-hangs-at-exit", timeout_s=30)

    assert (result.outcome, len(result.attempts)) == ("ok", 1)
    assert result.time is not None


def test_provenance_tells_the_threads_that_the_worker_really_had(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    result, _ = supervised(tmp_path, "test-measures", cpu_threads=1)

    assert result.provenance["settings"]["OMP_NUM_THREADS"] == "1"
    assert result.device["threads"] == 1


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({}, ()),
        ({"model": "hf:tiny-llama", "lora": "rank=2"}, ("transformers", "peft")),
    ],
)
def test_provenance_tells_the_libraries_that_built_the_model_and_no_others(
    tmp_path, fields, used
) -> None:
    expected = {name: version(name) for name in used}
    result, _ = supervised(tmp_path, "test-measures", **fields)

    packages = result.provenance["packages"]
    told = {name: packages[name] for name in ("transformers", "peft") if name in packages}
    assert told == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_cuda_runs_on_the_gpu_that_is_named(tmp_path, dtype: str) -> None:
    result, log = supervised(tmp_path, device="cuda", method="opacus-ghost", dtype=dtype)

    assert result.outcome == "ok", log
    assert result.device["uuid"].startswith("GPU-")
    assert result.device["driver"]
    assert result.provenance["settings"]["CUDA_VISIBLE_DEVICES"] == result.device["uuid"]
    assert result.memory.peak_allocated_bytes > 0
    assert result.memory.alloc_retries == 0


@pytest.mark.gpu
def test_cuda_oom_is_real_and_says_what_was_held(tmp_path) -> None:
    result, _ = supervised(
        tmp_path,
        device="cuda",
        model="medium",
        batch_size=16,
        seq_len=512,
        memory_limit_bytes="1GiB",
    )

    assert (result.outcome, len(result.attempts)) == ("oom", 1)
    assert result.error.requested_bytes > 0
    assert 0 < result.error.allocated_bytes <= result.error.reserved_bytes <= 2**30


def start_script(tmp_path: Path, name: str, instrument: str) -> subprocess.Popen[str]:
    command = profile_command(tmp_path / name, f"--instrument={instrument}")
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def asleep(tmp_path, tmp_path_factory, monkeypatch) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A supervisor and its worker, which sleeps in the middle of its work."""
    reached = tmp_path_factory.mktemp("asleep") / "reached"
    monkeypatch.setenv("DPPROF_TEST_MARKER", str(reached))
    supervisor = start_script(tmp_path, "x.json", "test-sleeps")
    wait_for(reached.exists)
    (worker,) = psutil.Process(supervisor.pid).children()
    return supervisor, worker


def test_a_killed_supervisor_takes_its_worker_along(asleep, tmp_path) -> None:
    supervisor, worker = asleep
    supervisor.kill()
    supervisor.wait()

    worker.wait(timeout=10)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_supervisor_ends_its_worker_and_leaves_no_result(
    asleep, tmp_path, number
) -> None:
    supervisor, worker = asleep
    supervisor.send_signal(number)

    assert supervisor.wait(timeout=10) != 0
    worker.wait(timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_who_waits_is_told_for_whom_and_begins_afterwards(asleep, tmp_path) -> None:
    supervisor, _ = asleep
    second = start_script(tmp_path, "y.json", "test-measures")
    assert second.stderr is not None
    said = next(line for line in second.stderr if "waiting" in line)
    killed_at = dt.datetime.now(dt.UTC)
    supervisor.kill()
    second.communicate(timeout=120)

    assert f"waiting for process {supervisor.pid} (" in said
    assert "subcommand.py profile" in said
    assert "running since 20" in said
    assert dt.datetime.fromisoformat(read_result(tmp_path / "y.json").started_at) >= killed_at


def test_supervise_outside_the_main_thread(tmp_path) -> None:
    thread = threading.Thread(target=supervised, args=(tmp_path,), kwargs={"dtype": "tf32"})
    thread.start()
    thread.join()

    assert json.loads((tmp_path / "result.json").read_text())["outcome"] == "unsupported"
