"""Whatever the tables hold, there is a report, and it says what is missing."""

import itertools
from functools import partial

import pytest
from factory import make_experiment, make_memory, tables_of_runs
from pypdf import PdfReader

from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.document import Drawing
from dpprof.results.report.rendering.write import write_report

HOSTILE = r"a_b % c & d # e $ f { g } ~ ^ \input{/etc/passwd} < k > $(touch pwned) `id`"


def tables_of(root, methods=("standard", "opacus-ghost"), replicates=2, **fields):
    runs = [
        (make_experiment(method=method), "clean", fields | {"replicate": number})
        for method, number in itertools.product(methods, range(replicates))
    ]
    return tables_of_runs(root, *runs)


def with_memory(root, **fields):
    """Books of two methods, here and on a target that only one of them fits on."""
    ghost, hooks = {"parameters": 2**20}, {"per_sample_gradients": 2**40, "norm_samples": 1}
    here = {name: make_experiment(method=f"opacus-{name}") for name in ("ghost", "hooks")}
    there = {
        name: make_experiment(method=f"opacus-{name}", device="cuda", target="l4") for name in here
    }
    runs = [
        (experiments[name], instrument, {"recorded": make_memory(owned), **fields})
        for name, owned in (("ghost", ghost), ("hooks", hooks))
        for experiments, instrument in ((here, "memory"), (here, "estimate"), (there, "estimate"))
    ]
    return tables_of_runs(root, *runs)


def without_times(root):
    tables = tables_of(root)
    unknown = dict.fromkeys(["median_step_s", "step_low_s", "step_high_s", "step_ratio"])
    settings = tables["settings"].assign(fastest=None, fastest_step_s=None, fastest_ratio=None)
    return tables | {
        "experiments": tables["experiments"].assign(**unknown, step_verdict=None),
        "settings": settings,
    }


def rename(make, root):
    """Tables in which names do harm, if they are read as markup."""
    names = dict.fromkeys(("opacus-ghost", "l4"), HOSTILE)
    return {stem: table.replace(names) for stem, table in make(root).items()}


CASES = {
    "one method": (partial(tables_of, methods=["opacus-ghost"]), "with opacus-ghost"),
    "only standard": (partial(tables_of, methods=["standard"]), "no private method succeeded"),
    "one replicate": (
        partial(tables_of, replicates=1),
        "Nothing was replicated, so how far times differ by noise alone is unknown.",
    ),
    "only failures": (partial(tables_of, outcome="oom"), "No experiment succeeded"),
    "no times": (without_times, "no time was measured"),
    "nothing but recorded memory": (with_memory, "opacus-hooks does not fit"),
    "memory of failures": (partial(with_memory, outcome="oom"), "No experiment succeeded"),
    "hostile names in memory": (partial(rename, with_memory), r"\input{/etc/passwd}"),
    "hostile names": (partial(rename, tables_of), r"\input{/etc/passwd}"),
    "empty tables": (
        lambda root: {stem: table.head(0) for stem, table in tables_of(root).items()},
        "none has a result",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_report_is_built_and_says_what_is_missing(case, tmp_path) -> None:
    make, sentence = CASES[case]
    missing = Drawing(name="tradeoff", caption="x", missing="no experiment has a time")
    document = build_document(make(tmp_path), [missing])
    write_report(document, tmp_path)

    pages = [page.extract_text() for page in PdfReader(tmp_path / "report.pdf").pages]
    text = "".join("".join(pages).replace("\u200b", "").split())
    assert "".join(sentence.split()) in text
    assert "tradeoff:noexperimenthasatime." in text
    for file in ("report.md", "report.tex", "report.json"):
        content = (tmp_path / file).read_text()
        assert "root:x:" not in content
        assert " nan" not in content.lower(), file
    assert not (tmp_path / "pwned").exists()
