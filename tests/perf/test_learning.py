"""The sweep of trainings that learn: what it plans and refuses, one run of it, and its report."""

import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from snapshots import assert_sentences

import learning
import learning_plan
import learning_report
import learning_tasks
from dpprof.experiments.config.validation import InputError
from dpprof.private.accounting.noise_multiplier import spend
from dpprof.private.accounting.schedule import Schedule
from learning_plan import Cell, CellResult, Run, Settings

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "config" / "learning.yaml"


def test_the_sweep_has_every_task_library_and_epsilon_and_each_change_once() -> None:
    cells = learning_plan.read_sweep(SWEEP).plan()

    assert len({cell.name for cell in cells}) == len(cells) == 55
    base = [cell for cell in cells if cell.change is None and cell.library != "torch"]
    assert len(base) == 3 * 5 * 2
    assert {cell.seeds for cell in base} == {5}
    by_name = {cell.name: cell.settings for cell in cells}
    assert by_name["digits-dpprof-2-batch_size-512"].batch_size == 512
    assert by_name["adapters-dpprof-2-trained-all"].trained == "all"
    assert "characters-dpprof-2-trained-all" not in by_name


def test_a_bad_sweep_is_refused_by_key_value_and_what_is_allowed(tmp_path) -> None:
    file = tmp_path / "sweep.yaml"

    def refuse(case) -> str:
        path, value = case
        sweep = part = yaml.safe_load(SWEEP.read_text())
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        file.write_text(yaml.safe_dump(sweep))
        with pytest.raises(InputError) as refused:
            learning_plan.read_sweep(file)
        return str(refused.value).replace(f"{tmp_path}/", "")

    assert_sentences("perf/learning", refuse)


SETTINGS = Settings(batch_size=128, steps=3, learning_rate=0.2, max_grad_norm=1.0, delta=1e-4)


def test_a_cell_trains_with_the_noise_that_its_epsilon_asks_for() -> None:
    cell = Cell(task="digits", library="dpprof", epsilon=2.0, settings=SETTINGS, seeds=2)

    trained = learning.train(cell, None)

    assert [run.seed for run in trained.runs] == [0, 1]
    assert all(0 <= run.held_out <= 1 and run.cpu_s > 0 for run in trained.runs)
    assert trained.parameters == 16 * 10 + 32 * 16 * 9 + 32 + 128 * 10 + 10
    schedule = Schedule(trained.samples, cell.settings.batch_size, cell.settings.steps)
    epsilon = spend(schedule, trained.noise_multiplier, cell.settings.delta, "prv")
    assert epsilon == pytest.approx(2, rel=0.02)


def test_libraries_take_the_same_step_without_noise_on_the_same_batch() -> None:
    data = learning_tasks.load_data("digits")
    batch, stepped = None, []
    for library in ("dpprof", "opacus", "torch"):
        cell = Cell(task="digits", library=library, epsilon=None, settings=SETTINGS, seeds=1)
        torch.manual_seed(0)
        model = learning_tasks.build_model("digits", SETTINGS, None)
        step, batches = learning.prepare(cell, model, data.train, 0.0, 0)
        drawn = next(batches)
        batch = batch or drawn  # dpprof's optimizer takes batches of its own loader alone
        step(*batch)
        stepped.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    torch.testing.assert_close(stepped[0], stepped[1])
    torch.testing.assert_close(stepped[0], stepped[2])


def test_texts_are_cut_into_pieces_and_no_sample_is_on_both_sides() -> None:
    data = learning_tasks.load_data("adapters")
    inputs, labels = data.train.tensors

    assert inputs.shape[1] == learning_tasks.T
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert len(inputs) % 256 == 0
    text = "".join(learning_tasks.LETTERS[code] for code in inputs[:200].flatten())
    assert "def " in text
    assert "self." in text


VALUES = {"dpprof": (0.5, 0.7), "opacus": (0.5, 0.6)}


def write_results(folder: Path) -> list[Path]:
    """Write the files of one task at two epsilons, and of one change."""
    paths = []
    for epsilon in (None, 2.0):
        for library, values in (VALUES | ({} if epsilon else {"torch": (0.9, 0.9)})).items():
            paths.append(write_result(folder, library, epsilon, values))
    return [*paths, write_result(folder, "dpprof", 2.0, (0.7, 0.9), "batch_size-512")]


def write_result(folder, library, epsilon, values, change=None) -> Path:
    cell = Cell(
        task="digits", library=library, epsilon=epsilon, settings=SETTINGS, seeds=2, change=change
    )
    runs = [
        Run(seed=seed, before=0.1, held_out=value, cpu_s=1.5) for seed, value in enumerate(values)
    ]
    result = CellResult(
        cell=cell,
        metric="accuracy",
        samples=1280,
        sample_rate=0.1,
        noise_multiplier=2.0,
        parameters=6090,
        runs=runs,
        place="Measured in a test",
    )
    path = folder / f"{cell.name}.json"
    path.write_text(result.model_dump_json())
    return path


def test_the_report_has_means_intervals_and_differences_by_seed(tmp_path, monkeypatch) -> None:
    paths = write_results(tmp_path)
    arguments = ["learning_report.py", *map(str, paths), "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", arguments)

    learning_report.main()

    rows = (tmp_path / "out" / "learning.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2 * 2 + 2 + 2
    text = (tmp_path / "out" / "report.md").read_text().replace("\\", "")
    # By hand: of two values that differ by d, the interval reaches 12.706 d / 2 to each side.
    table = [re.split(r" *\| *", row)[1:-1] for row in text.splitlines() if row.startswith("|")]
    whole = next(row for row in table if row[:2] == ["digits", "2"])
    assert whole[2:5] == ["0.600 ± 1.271", "0.550 ± 0.635", "+0.050 ± 0.635"]
    none = next(row for row in table if row[:2] == ["digits", "none"])
    assert none[-1] == "1.5"
    change = next(row for row in table if row[1] == "batch size 512")
    assert change[2:4] == ["0.800 ± 1.271", "+0.200 ± 0.000"]
    assert "differ in 0 of 2 pairs by more than the 95 % interval" in text
    assert (tmp_path / "out" / "figures" / "learning.png").stat().st_size > 10_000


def test_intervals_of_several_comparisons_are_wider() -> None:
    values = learning_report.pd.Series([1.0, 2.0, 3.0])

    mean, low, high = learning_report.find_interval(values)

    assert (mean, high - mean) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert mean - low == pytest.approx(high - mean)
    assert learning_report.find_interval(values, 15)[2] > 2 * high - mean
