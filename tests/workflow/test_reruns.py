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


def methods_of(names) -> list[str]:
    """The methods of result files."""
    # A digest may begin with a b too.
    return sorted(re.split(r"-b\d+-t\d+-", name)[0].partition("-")[2] for name in names)


def methods_measured_again(checkout: Checkout, before) -> list[str]:
    """Tell which methods have new or changed result files."""
    return methods_of(n for n, state in checkout.results().items() if before.get(n) != state)


def test_nothing_new_in_the_config_runs_nothing(finished: Checkout, either) -> None:
    for file in (finished.path / "src" / "dpprof").rglob("*.py"):
        file.write_bytes(b"# a comment\n\n" + file.read_bytes())
    assert "Nothing to be done" in finished.snakemake("-n")
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


def test_an_edited_figure_and_deleted_products_run_no_experiment(
    finished: Checkout, before
) -> None:
    results = finished.path / "results"
    drawn = (results / "figures" / "tradeoff.png").read_bytes()
    deleted = ["report.tex", "tables/runs.csv"]
    for name in deleted:
        (results / name).unlink()
    finished.edit("src/dpprof/figures/tradeoff.py", '"step time"', '"time of a step"')
    finished.snakemake()

    assert all((results / name).stat().st_size for name in deleted)
    assert (results / "figures" / "tradeoff.png").read_bytes() != drawn
    assert finished.results() == before


@pytest.mark.parametrize(
    ("file", "rules"),
    [
        ("figures/tradeoff.py", {"figure", "report"}),
        ("report/templates/report.md.j2", {"report"}),
        ("analysis/tables.py", {"figure", "report", "tables"}),
    ],
)
def test_an_edited_file_runs_what_rests_on_it_alone(finished: Checkout, file, rules) -> None:
    with (finished.path / "src" / "dpprof" / file).open("a") as opened:
        opened.write("pass\n")
    assert set(finished.planned()) == rules


def verdicts(checkout: Checkout) -> dict[str, int]:
    found = (checkout.path / "results" / "verify").glob("*.json")
    return {path.stem: path.stat().st_mtime_ns for path in found}


def test_an_edited_method_is_planned_again_alone_in_a_new_clone(finished: Checkout) -> None:
    finished.forget_snakemakes_records()
    finished.edit("src/dpprof/methods/opacus/hooks.py", "import nn", "import nn; EDITED = True")
    planned = finished.planned(TABLES)

    assert methods_of(planned["profile"]) == ["opacus-hooks"]
    assert planned["verify"] == ["built-in-opacus-hooks.json"]


def test_an_edited_method_is_measured_and_verified_again_alone(finished: Checkout, before) -> None:
    known = verdicts(finished)
    finished.edit("src/dpprof/methods/opacus/hooks.py", "import nn", "import nn; EDITED = True")
    finished.snakemake(TABLES)
    after = verdicts(finished)

    assert methods_measured_again(finished, before) == ["opacus-hooks"]
    assert finished.table("runs")["code_is_current"].all()
    assert set(after) == {"built-in-opacus-hooks", "built-in-standard"}
    assert [name for name in after if after[name] != known[name]] == ["built-in-opacus-hooks"]


def test_a_removed_experiment_leaves_tables_and_report(finished: Checkout, before) -> None:
    finished.edit(CONFIG, "[standard, opacus-hooks]", "standard")
    finished.snakemake()

    assert finished.results() == before
    assert set(finished.table("experiments")["method"]) == {"standard"}
    assert "opacus-hooks" not in (finished.path / "results" / "report.md").read_text()
    finished.dpprof("prune", CONFIG, "--delete")
    assert not any("opacus-hooks" in name for name in finished.results())
    assert "Nothing to be done" in finished.snakemake("-n")


def test_a_deleted_result_is_measured_again(finished: Checkout, either) -> None:
    next((finished.path / "results" / "clean").glob("*hooks*.json")).unlink()
    planned = finished.planned(TABLES)

    assert set(planned) == {"profile", "tables"}
    assert methods_of(planned["profile"]) == ["opacus-hooks"]


def test_deleted_ceilings_are_measured_again_and_nothing_else(finished: Checkout, before) -> None:
    (ceilings,) = (finished.path / "results" / "ceilings").iterdir()
    ceilings.unlink()
    finished.edit("src/dpprof/devices/limits.py", "1000.0", "2000.0")
    finished.snakemake(TABLES)

    assert ceilings.is_file()
    assert finished.results() == before
    table = finished.table("ceilings")
    assert set(table["device"]) == {ceilings.stem}
    figures = table.set_index(table["dtype"].fillna(table["figure"]))
    assert figures["measured"].drop("tf32").to_dict() == {
        "float32": 2000.0,
        "bfloat16": 2000.0,
        "float64": 2000.0,
        "bytes_per_s": 8.0,
        "launch_s": 1e-6,
    }
    assert figures.loc["tf32", "reason"] == "invented for cpu"


def test_an_edited_measurement_of_ceilings_measures_those_alone(finished: Checkout) -> None:
    finished.edit("src/dpprof/devices/limits.py", "1000.0", "2000.0")
    assert set(finished.planned(TABLES)) == {"ceilings", "tables"}


def test_two_configs_alternate_without_measuring_again(finished: Checkout, before) -> None:
    other = finished.path / "other.yaml"
    text = (finished.path / CONFIG).read_text()
    other.write_text(text.replace("[standard, opacus-hooks]", "microbatch"))
    finished.snakemake(TABLES, "--configfile", "other.yaml")
    both = finished.results()
    assert methods_measured_again(finished, before) == ["microbatch"]

    finished.snakemake(TABLES)
    assert set(finished.table("experiments")["method"]) == {"standard", "opacus-hooks"}
    finished.forget_snakemakes_records()
    assert set(finished.planned(TABLES, "--configfile", "other.yaml")) == {"tables"}
    assert finished.results() == both


def test_a_running_sweep_goes_on_as_it_began(checkout: Checkout) -> None:
    """Whatever becomes of its config, and whatever else is planned meanwhile."""
    text = (checkout.path / CONFIG).read_text()
    (checkout.path / "other.yaml").write_text(text.replace("seq_len: 4", "seq_len: 5"))
    sweep = checkout.start(TABLES)
    wait_for(checkout.results)
    assert len(checkout.planned("--configfile", "other.yaml")["profile"]) == 3
    checkout.edit(CONFIG, "batch_size: 2", "batch_size: 7")
    checkout.edit(CONFIG, "sweeps:", "this is no config any more: [")
    said, _ = sweep.communicate(timeout=300)

    assert sweep.returncode == 0, said
    assert len(checkout.results()) == 3
    experiments = checkout.table("experiments")
    assert sorted(experiments["batch_size"]) == [1, 1, 2]
    assert set(experiments["seq_len"]) == {4}
