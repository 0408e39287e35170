import copy
from typing import Any

import pytest
from snapshots import assert_sentences

from dpprof.experiments.config.sweep import MAX_RUNS, Run, expand, parse_config
from dpprof.experiments.config.validation import InputError

CONFIG: dict[str, Any] = {
    "defaults": {"model": "small", "seq_len": 16, "warmup_steps": 1},
    "sweeps": {"methods": {"method": ["standard", "opacus-ghost"], "batch_size": [4, 8]}},
}


def runs_of(config: dict[str, Any], device: str = "cpu") -> list[Run]:
    return [run for runs in expand(parse_config(config), lambda: device).values() for run in runs]


def changed(**sweep: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["sweeps"]["methods"].update(sweep)
    return config


def test_lists_multiply_and_defaults_fill() -> None:
    found = [(r.experiment.method, r.experiment.batch_size) for r in runs_of(CONFIG)]

    assert sorted(found) == [
        ("opacus-ghost", 4),
        ("opacus-ghost", 8),
        ("standard", 4),
        ("standard", 8),
    ]
    assert {run.experiment.seq_len for run in runs_of(CONFIG)} == {16}
    assert {run.experiment.warmup_steps for run in runs_of(CONFIG)} == {1}


def test_a_sweep_overrides_defaults() -> None:
    assert {run.experiment.seq_len for run in runs_of(changed(seq_len=[32, 64]))} == {32, 64}


def test_a_sweep_that_is_none_is_left_out() -> None:
    assert runs_of({**CONFIG, "sweeps": {**CONFIG["sweeps"], "other": "none"}}) == runs_of(CONFIG)


def test_replicates_and_instruments_multiply_runs_not_experiments() -> None:
    runs = runs_of(changed(replicates=3, instruments=["clean", "other"]))

    assert len({run.experiment.id for run in runs}) == 4
    assert len(runs) == 4 * 3 * 2
    assert {run.replicate for run in runs} == {0, 1, 2}


def test_exclude_drops_what_matches_all_its_keys() -> None:
    config = CONFIG | {"exclude": [{"method": "standard", "batch_size": [8]}]}

    found = {(r.experiment.method, r.experiment.batch_size) for r in runs_of(config)}
    assert found == {("standard", 4), ("opacus-ghost", 4), ("opacus-ghost", 8)}


def test_a_mapping_of_dimensions_is_one_value() -> None:
    dimensions = {"vocab_size": 10, "d_model": 8, "layers": 1, "heads": 2}
    runs = runs_of(changed(model=["small", dimensions]))

    assert {run.experiment.model_name for run in runs} == {"small", "custom"}


def test_device_auto_is_resolved_once_for_all() -> None:
    asked = []

    def resolve() -> str:
        asked.append(1)
        return "cuda"

    runs = expand(parse_config(changed(device=["auto", "cpu"])), resolve)["methods"]

    assert {run.experiment.device for run in runs} == {"cuda", "cpu"}
    assert len(asked) == 1


def test_exclude_understands_device_auto() -> None:
    config = changed(device=["cpu", "cuda"]) | {"exclude": [{"device": "auto"}]}

    assert {run.experiment.device for run in runs_of(config, device="cuda")} == {"cpu"}


def test_a_million_points_are_refused_before_they_are_made() -> None:
    config = changed(seed=list(range(1000)), batch_size=list(range(1, 1001)))

    with pytest.raises(InputError, match=rf"sweeps\.methods: 2,000,000 runs .* {MAX_RUNS:,}"):
        runs_of(config)


def refusal_of(case: Any) -> str:
    """Refuse keys of a sweep, keys of the config, or what is no config."""
    if isinstance(case, dict):
        of_config = case.keys() & {"swep", "sweeps", "defaults", "exclude", "container"}
        case = CONFIG | case if of_config else changed(**case)
    with pytest.raises(InputError) as caught:
        runs_of(case)
    return str(caught.value)


def test_bad_configs_are_one_sentence() -> None:
    assert_sentences("spec/sweep", refusal_of)


def test_a_key_of_sweeps_at_the_top_is_told_where_it_belongs() -> None:
    with pytest.raises(InputError) as refused:
        parse_config(CONFIG | {"seq_len": 8})

    assert str(refused.value) == (
        "seq_len: is a key of defaults and of sweeps, not of the config itself; on Snakemake's "
        "command line: --config 'defaults={seq_len: ...}'"
    )


@pytest.mark.parametrize("image", ["docker://registry.example/dpprof:1", "./dpprof.sif", "a"])
def test_a_container_is_an_image_or_a_path(image: str) -> None:
    assert parse_config(CONFIG | {"container": image}).container == image
