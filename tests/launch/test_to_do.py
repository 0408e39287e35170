"""Tests of what a sweep says before it begins."""

from dpprof.launch.to_do import tell_to_do


def test_each_part_has_its_number_and_time_and_they_add_up() -> None:
    jobs = {"ceilings": 1, "measurement": 10, "verify": 5, "report": 1, "all": 1}

    assert list(tell_to_do(jobs, cores=2)) == [
        "to do, about 2 min 35 s with small models on a processor:",
        "  1 device's ceilings, about 45 s",
        "  10 measurements, about 1 min 20 s",
        "  5 verifications, about 18 s",
        "  1 report, about 12 s",
    ]


def test_only_what_may_run_beside_others_is_faster_on_more_cores() -> None:
    jobs = {"measurement": 4, "prediction": 8}
    [_, alone, beside] = tell_to_do(jobs, cores=8)

    assert alone == "  4 measurements, about 32 s"
    assert beside == "  8 predictions, about 8 s"


def test_with_nothing_to_do_nothing_is_said() -> None:
    assert list(tell_to_do({"all": 1}, cores=2)) == []
