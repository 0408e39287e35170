"""What runs again after a change, and what does not."""

import re

import pytest
from checkout import TABLES, Checkout, wait_for

pytestmark = pytest.mark.workflow

CONFIG = "config/config.yaml"


@pytest.fixture
def before(finished: Checkout):
    return finished.results()


@pytest.fixture(params=["with .snakemake", "without .snakemake, all touched"])
def either(request, finished: Checkout):
    """The results, where Snakemake may know nothing of how they came about."""
    if request.param.startswith("without"):
        finished.forget_snakemakes_records()
    return finished.results()


def methods_measured_again(checkout: Checkout, before) -> list[str]:
    """Tell which methods have new or changed result files."""
    changed = [name for name, state in checkout.results().items() if before.get(name) != state]
    # A digest may begin with a b too.
    return sorted(re.split(r"-b\d+-t\d+-", name)[0].partition("-")[2] for name in changed)


def test_nothing_new_in_the_config_runs_nothing(finished: Checkout, either) -> None:
    for file in (finished.path / "src" / "dpprof").rglob("*.py"):
        file.write_bytes(b"# a comment\n\n" + file.read_bytes())
    assert "Nothing to be done" in finished.snakemake()
    (finished.path / CONFIG).write_text(
        """
        # the same sweep, written by somebody else
        sweeps:
          two: {batch_size: [2], method: [standard]}
          one: {batch_size: 1, method: [opacus-hooks, standard]}
        defaults:
          timed_steps: 2
          warmup_steps: 1
          device: cpu
          seq_len: 4
          model: {heads: 2, layers: 1, d_model: 8, vocab_size: 16}
        """
    )

    assert "Nothing to be done" in finished.snakemake()
    assert finished.results() == either


def test_a_changed_batch_size_runs_its_experiment_alone(finished: Checkout, before) -> None:
    finished.edit(CONFIG, "batch_size: 2", "batch_size: 3")
    finished.snakemake(TABLES, "--cores", "1", "--resources", "gpu=1")

    assert methods_measured_again(finished, before) == ["standard"]
    assert len(finished.results()) == len(before) + 1
    assert sorted(finished.table("experiments")["batch_size"]) == [1, 1, 3]


def test_deleted_products_are_made_again_and_nothing_else(finished: Checkout, before) -> None:
    results = finished.path / "results"
    deleted = ["report.tex", "figures/tradeoff.pdf", "tables/runs.csv"]
    for name in deleted:
        (results / name).unlink()
    finished.snakemake()

    assert all((results / name).stat().st_size for name in deleted)
    assert finished.results() == before


def test_an_edited_figure_runs_no_experiment(finished: Checkout, before) -> None:
    figure = finished.path / "results" / "figures" / "tradeoff.png"
    drawn = figure.read_bytes()
    finished.edit("src/dpprof/figures/tradeoff.py", '"step time"', '"time of a step"')
    finished.snakemake("results/report.pdf")

    assert finished.results() == before
    assert figure.read_bytes() != drawn


def test_an_edited_report_and_table_run_no_experiment(finished: Checkout) -> None:
    before = finished.results()
    made = [finished.path / "results" / name for name in ("report.md", "tables/runs.csv")]
    ages = [path.stat().st_mtime_ns for path in made]
    for file, more in (("report/templates/report.md.j2", "\n"), ("analysis/tables.py", "pass\n")):
        with (finished.path / "src" / "dpprof" / file).open("a") as opened:
            opened.write(more)
    finished.snakemake()

    assert finished.results() == before
    assert all(path.stat().st_mtime_ns > age for path, age in zip(made, ages, strict=True))


def verdicts(checkout: Checkout) -> dict[str, int]:
    found = (checkout.path / "results" / "verify").glob("*.json")
    return {path.stem: path.stat().st_mtime_ns for path in found}


def test_an_edited_method_is_measured_and_verified_again_alone(finished: Checkout, either) -> None:
    known = verdicts(finished)
    finished.edit("src/dpprof/methods/opacus/hooks.py", "import nn", "import nn; EDITED = True")
    finished.snakemake(TABLES)
    after = verdicts(finished)

    assert methods_measured_again(finished, either) == ["opacus-hooks"]
    assert finished.table("runs")["code_is_current"].all()
    assert set(after) == {"built-in-opacus-hooks", "built-in-standard"}
    assert [name for name in after if after[name] != known[name]] == ["built-in-opacus-hooks"]


def test_a_removed_experiment_leaves_tables_and_report(finished: Checkout, before) -> None:
    finished.edit(CONFIG, "[standard, opacus-hooks]", "standard")
    finished.snakemake()

    assert finished.results() == before
    assert set(finished.table("experiments")["method"]) == {"standard"}
    assert "opacus-hooks" not in (finished.path / "results" / "report.md").read_text()

    listed = finished.dpprof("prune")
    assert "opacus-hooks" in listed
    assert finished.results() == before
    finished.dpprof("prune", "--delete", status=2)
    assert finished.results() == before
    finished.dpprof("prune", CONFIG, "--delete")
    assert not any("opacus-hooks" in name for name in finished.results())
    assert "Nothing to be done" in finished.snakemake()


def test_a_deleted_result_is_measured_again(finished: Checkout, either) -> None:
    next((finished.path / "results" / "clean").glob("*hooks*.json")).unlink()
    finished.snakemake(TABLES)

    assert methods_measured_again(finished, either) == ["opacus-hooks"]


def test_deleted_ceilings_are_measured_again_and_nothing_else(finished: Checkout, before) -> None:
    (ceilings,) = (finished.path / "results" / "ceilings").iterdir()
    table = finished.table("ceilings")
    ceilings.unlink()
    finished.snakemake(TABLES)

    assert ceilings.is_file()
    assert finished.results() == before
    assert set(table["device"]) == {ceilings.stem}
    figures = table.set_index(table["dtype"].fillna(table["figure"]))
    assert figures["measured"].drop("tf32").to_dict() == {
        "float32": 1000.0,
        "bfloat16": 1000.0,
        "float64": 1000.0,
        "bytes_per_s": 8.0,
        "launch_s": 1e-6,
    }
    assert figures.loc["tf32", "reason"] == "invented for cpu"


def test_an_edited_measurement_of_ceilings_measures_those_alone(finished: Checkout) -> None:
    results, (ceilings,) = finished.results(), (finished.path / "results" / "ceilings").iterdir()
    age = ceilings.stat().st_mtime_ns
    finished.edit("src/dpprof/devices/limits.py", "1000.0", "2000.0")
    finished.snakemake(TABLES)

    assert finished.results() == results
    assert ceilings.stat().st_mtime_ns > age
    assert finished.table("ceilings")["measured"].max() == 2000.0


def test_two_configs_alternate_without_measuring_again(finished: Checkout, before) -> None:
    other = finished.path / "other.yaml"
    text = (finished.path / CONFIG).read_text()
    other.write_text(text.replace("[standard, opacus-hooks]", "microbatch"))
    finished.snakemake(TABLES, "--configfile", "other.yaml")
    both = finished.results()
    assert methods_measured_again(finished, before) == ["microbatch"]

    for _ in range(2):
        finished.snakemake(TABLES)
        assert set(finished.table("experiments")["method"]) == {"standard", "opacus-hooks"}
        finished.forget_snakemakes_records()
        finished.snakemake(TABLES, "--configfile", "other.yaml")
        assert set(finished.table("experiments")["method"]) == {"standard", "microbatch"}
    assert finished.results() == both


def test_a_config_edited_while_a_sweep_runs_changes_nothing_in_it(checkout: Checkout) -> None:
    sweep = checkout.start()
    wait_for(checkout.results)
    checkout.edit(CONFIG, "batch_size: 2", "batch_size: 7")
    checkout.edit(CONFIG, "sweeps:", "this is no config any more: [")
    said, _ = sweep.communicate(timeout=300)

    assert sweep.returncode == 0, said
    assert len(checkout.results()) == 3
    assert sorted(checkout.table("experiments")["batch_size"]) == [1, 1, 2]


def test_a_dry_run_of_another_config_does_not_disturb_a_running_sweep(training: Checkout) -> None:
    other = training.path / "other.yaml"
    other.write_text((training.path / CONFIG).read_text().replace("seq_len: 4", "seq_len: 5"))
    sweep = training.start(TABLES)
    wait_for(training.results)
    said = training.snakemake("-n", "--configfile", "other.yaml")
    assert "rule profile:" in said
    said, _ = sweep.communicate(timeout=300)

    assert sweep.returncode == 0, said
    assert set(training.table("experiments")["seq_len"]) == {4}
