"""What runs again after a change, and what does not.

Which jobs a change asks for is what a dry run lists; one sweep shows that they run.
"""

import datetime as dt
import itertools
import json
import re

import pytest
from checkout import TABLES, Checkout
from children import wait_for

pytestmark = pytest.mark.workflow

CONFIG = "config/config.yaml"


@pytest.fixture
def before(finished: Checkout):
    return finished.results()


def methods_of(names) -> list[str]:
    """The methods of result files."""
    # A digest may begin with a b too.
    return sorted(re.split(r"-b\d+-t\d+-", name)[0].partition("-")[2] for name in names)


def methods_measured_again(checkout: Checkout, before) -> list[str]:
    """Tell which methods have new or changed result files."""
    return methods_of(n for n, state in checkout.results().items() if before.get(n) != state)


def in_either_state(usual: str):
    """Say what Snakemake knows of how the sweep came about: this, and if slow the other."""
    other = "nothing, all touched" if usual == "all" else "all"
    return pytest.mark.parametrize("known", [usual, pytest.param(other, marks=pytest.mark.slow)])


@in_either_state("nothing, all touched")
def test_nothing_new_in_the_config_or_the_code_runs_nothing(finished: Checkout, known) -> None:
    """Comments, another order of keys and another spelling of a rule's command are nothing new."""
    if known != "all":
        finished.forget_snakemakes_records()
    for file in (finished.path / "src" / "dpprof").rglob("*.py"):
        file.write_bytes(b"# a comment\n\n" + file.read_bytes())
    for path in (finished.path / "workflow" / "rules").glob("*.smk"):
        path.write_text(path.read_text().replace('" --log', '"  --log').replace("-P -m", "-m"))
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

    assert "Nothing to be done" in finished.snakemake("-n", "--snakefile", "workflow/Snakefile")


@in_either_state("all")
def test_what_is_edited_deleted_or_asked_for_is_planned_alone(finished: Checkout, known) -> None:
    """A method is edited, a result is deleted, and a batch size is asked for."""
    if known != "all":
        finished.forget_snakemakes_records()
    finished.edit(
        "src/dpprof/subjects/methods/opacus/hooks.py", "\nclass ", "\nEDITED = True\n\n\nclass "
    )
    (deleted,) = (finished.path / "results" / "clean").glob("*-b2-*.json")
    deleted.unlink()
    finished.edit(CONFIG, "batch_size: 2", "batch_size: [2, 3]")
    planned = finished.planned(TABLES, "--cores", "1", "--resources", "gpu=1")

    assert methods_of(planned["profile"]) == ["opacus-hooks", "standard", "standard"]
    assert deleted.name in planned["profile"]
    assert any("-b3-" in name for name in planned["profile"])
    assert planned["verify"] == ["built-in-opacus-hooks.json"]
    assert set(planned) == {"profile", "verify", "tables"}


def test_an_edited_figure_and_deleted_products_run_no_experiment(finished: Checkout) -> None:
    for name in ("report.tex", "tables/runs.csv"):
        (finished.path / "results" / name).unlink()
    finished.edit("src/dpprof/results/figures/tradeoff.py", "step time (", "time of a step (")

    assert set(finished.planned()) == {"tables", "figure", "report"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "rules"),
    [
        ("results/report/templates/report.md.j2", {"report"}),
        ("results/analysis/tables/build.py", {"figure", "report", "tables"}),
    ],
)
def test_an_edited_file_runs_what_rests_on_it_alone(finished: Checkout, file, rules) -> None:
    with (finished.path / "src" / "dpprof" / file).open("a") as opened:
        opened.write("pass\n")
    assert set(finished.planned()) == rules


def verdicts(checkout: Checkout) -> dict[str, int]:
    found = (checkout.path / "results" / "verify").glob("*.json")
    return {path.stem: path.stat().st_mtime_ns for path in found}


def test_an_edited_method_and_deleted_ceilings_are_measured_again_alone(
    finished: Checkout, before
) -> None:
    known = verdicts(finished)
    finished.edit(
        "src/dpprof/subjects/methods/opacus/hooks.py", "\nclass ", "\nEDITED = True\n\n\nclass "
    )
    (ceilings,) = (finished.path / "results" / "ceilings").iterdir()
    ceilings.unlink()
    finished.edit("src/dpprof/measure/devices/limits.py", "1000.0", "2000.0")
    finished.snakemake(TABLES)
    after = verdicts(finished)

    assert methods_measured_again(finished, before) == ["opacus-hooks"]
    assert len(finished.results()) == len(before)
    assert finished.table("runs")["code_is_current"].all()
    assert set(after) == {"built-in-opacus-hooks", "built-in-standard"}
    assert [name for name in after if after[name] != known[name]] == ["built-in-opacus-hooks"]
    table = finished.table("ceilings")
    assert set(table["device"]) == {ceilings.stem}
    measured = table.set_index(table["dtype"].fillna(table["figure"]))["measured"]
    assert set(measured[["float32", "bfloat16", "float64"]]) == {2000.0}


def test_a_removed_experiment_leaves_the_tables_and_comes_back_unmeasured(
    finished: Checkout, before
) -> None:
    text = (finished.path / CONFIG).read_text()
    (finished.path / "other.yaml").write_text(text.replace("[standard, opacus-hooks]", "standard"))
    finished.snakemake(TABLES, "--configfile", "other.yaml")

    assert finished.results() == before
    assert set(finished.table("experiments")["method"]) == {"standard"}
    finished.forget_snakemakes_records()
    assert set(finished.planned(TABLES)) == {"tables"}
    finished.dpprof("prune", "other.yaml", "--delete")
    assert methods_of(finished.results()) == ["standard", "standard"]


def test_a_running_sweep_goes_on_as_it_began_with_one_run_at_a_time(checkout: Checkout) -> None:
    """Whatever becomes of its config, whatever else is planned, and with cores to spare."""
    checkout.edit(CONFIG, "[standard, opacus-hooks]", "standard\n    replicates: 2")
    text = (checkout.path / CONFIG).read_text()
    (checkout.path / "other.yaml").write_text(text.replace("seq_len: 4", "seq_len: 5"))
    sweep = checkout.start(TABLES, "--cores", "4")
    wait_for(checkout.results)
    assert len(checkout.planned("--configfile", "other.yaml")["profile"]) == 3
    checkout.edit(CONFIG, "batch_size: 2", "batch_size: 7")
    checkout.edit(CONFIG, "sweeps:", "this is no config any more: [")
    said, _ = sweep.communicate(timeout=300)

    assert sweep.returncode == 0, said
    experiments = checkout.table("experiments")
    assert sorted(experiments["batch_size"]) == [1, 2]
    assert set(experiments["seq_len"]) == {4}
    (ceilings,) = (checkout.path / "results" / "ceilings").iterdir()
    results = [json.loads(content) for _, content in checkout.results().values()]
    ordered = sorted(results, key=lambda result: result["started_at"])
    assert [result["replicate"] for result in ordered] == [0, 0, 1]
    for earlier, later in itertools.pairwise([json.loads(ceilings.read_text()), *ordered]):
        end = start_of(earlier) + dt.timedelta(seconds=earlier["wall_s"])
        assert end <= start_of(later)


@pytest.mark.slow
def test_the_lock_alone_keeps_cpu_experiments_apart(checkout: Checkout) -> None:
    """Snakemake's own means are switched off."""
    options = ("--cores", "4", "--resources", "mem_mb=1000", "--set-threads", "profile=1")
    checkout.snakemake(TABLES, *options)

    results = [json.loads(content) for _, content in checkout.results().values()]
    assert len(results) == 3
    for earlier, later in itertools.pairwise(sorted(results, key=start_of)):
        assert start_of(earlier) + dt.timedelta(seconds=earlier["wall_s"]) <= start_of(later)


def start_of(result) -> dt.datetime:
    return dt.datetime.fromisoformat(result["started_at"])
