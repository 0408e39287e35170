import json

import pytest
from factory import make_experiment, tables_of_runs, write_synthetic

from dpprof.experiments.records.record import ResultError, _canonical
from dpprof.experiments.records.result import read_result, read_run, result_path
from dpprof.results.analysis.tables.frames import write_frame
from dpprof.system.files import sha256_hex


@pytest.fixture
def written(tmp_path):
    experiment = make_experiment()
    result = write_synthetic(tmp_path, experiment)
    return result, result_path(tmp_path, "clean", experiment.id, 0)


def test_contract_keys_are_always_present_and_identity_comes_first(written) -> None:
    document = json.loads(written[1].read_text())

    assert list(document)[:4] == ["schema_version", "experiment_id", "experiment", "spec_digest"]
    contract = (
        "schema_version experiment_id experiment spec_digest code_digest content_digest instrument "
        "replicate outcome error attempts started_at wall_s device provenance model samplers "
        "norm_plan memory time throughput compute io kernels energy verification privacy"
    )
    assert set(contract.split()) <= set(document)


EDITED = "was edited after it was written"
VERSION = '"schema_version": 2'
DAMAGED = {
    "nothing": (lambda _: "", "is not complete JSON.*delete it"),
    "half": (lambda text: text[: len(text) // 2], "is not complete JSON.*delete it"),
    "all but the end": (lambda text: text[:-3], "is not complete JSON.*delete it"),
    "deep": (lambda _: "[" * 100_000, "it is nested too deep"),
    "digits": (
        lambda _: f'{{"schema_version": {"1" * 10_000}}}',
        "it holds a number that is too large",
    ),
    "half as deep": (lambda _: f'{{{VERSION}, "a": {"[" * 900}{"]" * 900}}}', EDITED),
    "an edited number": (lambda text: text.replace('"wall_s": 1.5', '"wall_s": 1.4'), EDITED),
    "a smuggled nan": (lambda text: text.replace('"wall_s": 1.5', '"wall_s": NaN'), EDITED),
    "another version": (
        lambda text: text.replace(VERSION, '"schema_version": 99'),
        "has schema version 99, and this dpprof reads 2",
    ),
    "no result": (lambda _: "[1, 2]", "is not a result file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_cannot_be_trusted_is_named(written, name: str) -> None:
    damage, why = DAMAGED[name]
    _, path = written
    path.write_text(damage(path.read_text()))

    with pytest.raises(ResultError, match=rf"{path.name}: .*{why}"):
        read_result(path)


FORGED = {
    "a step in no time": lambda one: one["time"].update(step_s=[0.0]),
    "a median before the beginning": lambda one: one["time"].update(median_s=-1.0),
    "no memory at all": lambda one: one["memory"].update(peak_rss_bytes=0),
    "no attempt": lambda one: one.update(attempts=[]),
    "cores that are no number": lambda one: one["device"].update(cores="<script>"),
    "a version that is no text": lambda one: one["provenance"].update(packages={"torch": [1]}),
    "a timeline without an end": lambda one: one["memory"].update(
        timeline={"ops": [0, 1], "elapsed_s": None, "phase": ["forward"], "components": {}}
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_cannot_have_been_measured_is_refused_although_its_digest_fits(
    written, name: str
) -> None:
    _, path = written
    document = json.loads(path.read_text())
    FORGED[name](document)
    document["content_digest"] = sha256_hex(_canonical(document))
    path.write_text(json.dumps(document))

    with pytest.raises(ResultError, match="does not fit the schema"):
        read_result(path)


def test_a_result_under_another_runs_name_is_named(written, tmp_path) -> None:
    result, path = written
    path.rename(path.with_name(path.name.replace(".r0.", ".r1.")))

    with pytest.raises(ResultError, match="holds another run"):
        read_run(tmp_path, "clean", result.experiment_id, 1)


def test_text_without_an_encoding_is_spelled_where_it_is_written_and_where_it_is_read(
    tmp_path,
) -> None:
    experiment = make_experiment()
    write_synthetic(tmp_path, experiment, outcome="crashed", message="half a \ud800 character")
    path = result_path(tmp_path, "clean", experiment.id, 0)

    assert json.loads(path.read_text())["error"]["message"] == "half a \\ud800 character"
    document = json.loads(path.read_text())
    document["error"]["message"] = "half a \ud800 character"  # as an older dpprof would
    document["content_digest"] = sha256_hex(_canonical(document))
    path.write_text(json.dumps(document))
    assert read_result(path).error.message == "half a \\ud800 character"


def test_tables_of_such_a_result_can_be_written(tmp_path) -> None:
    experiment = make_experiment()
    fields = {"outcome": "crashed", "message": "half a \ud800 character"}
    tables = tables_of_runs(tmp_path, (experiment, "clean", fields))

    for name, table in tables.items():
        assert write_frame(name, table).encode()
