from factory import make_experiment, tables_of_runs
from reading import table_of

from dpprof.results.report.content import build_document


def observed(step_s, rss, allocated=None):
    peaks = {"peak_rss_bytes": rss, "peak_allocated_bytes": allocated}
    return {"observed": {"step_s": step_s, "steps": 1} | peaks}


def test_instruments_are_compared_with_clean(tmp_path) -> None:
    experiment = make_experiment()
    other = make_experiment(seed=1)
    table = tables_of_runs(
        tmp_path,
        (experiment, "clean", observed(1.0, 100, 10)),
        (experiment, "clean", {"replicate": 1} | observed(3.0, 300, 10)),
        (experiment, "memory", observed(5.0, 500, 10)),
        (experiment, "kernels", observed(2.5, 200)),
        (other, "memory", observed(9.0, 900)),
    )["instrument_overhead"].set_index("instrument")

    # Over medians of processes: 2 s and 200 bytes; what clean did not watch has no row.
    assert table["step_ratio"].to_dict() == {"memory": 2.5, "kernels": 1.25}
    assert table["rss_ratio"].to_dict() == {"memory": 2.5, "kernels": 1.0}
    assert table.loc["memory", "allocated_ratio"] == 1.0
    assert table["allocated_ratio"].isna().to_dict() == {"memory": False, "kernels": True}
    assert table["clean_processes"].tolist() == [2, 2]


def test_the_report_tells_what_watching_costs(tmp_path) -> None:
    pairs = ((2.0, 150), (4.0, 250))
    runs = [
        (make_experiment(seed=seed), instrument, observed(*facts))
        for seed, watched in enumerate(pairs)
        for instrument, facts in (("clean", (1.0, 100)), ("memory", watched))
    ]
    document = build_document(tables_of_runs(tmp_path, *runs), [])

    assert table_of(document, "What measuring costs") == (
        {
            "instrument": "memory",
            "experiments": "2",
            "step": "3.00 (2.00 to 4.00)",
            "peak RSS": "2.00 (1.50 to 2.50)",
        },
    )
