from factory import make_experiment, tables_of_runs


def observed(step_s, rss, allocated=None):
    return {
        "observed": {
            "step_s": step_s,
            "steps": 1,
            "peak_rss_bytes": rss,
            "peak_allocated_bytes": allocated,
        }
    }


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
