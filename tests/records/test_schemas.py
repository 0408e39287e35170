import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from factory import (
    make_experiment,
    write_synthetic,
    write_synthetic_ceilings,
    write_synthetic_verdict,
)

from dpprof.records.result import result_path
from dpprof.records.schemas import generated_files
from dpprof.spec.experiment import Experiment
from dpprof.spec.privacy import Privacy
from dpprof.spec.sweep import Config, Sweep

ROOT = Path(__file__).parents[2]
RESULT_SCHEMA = ROOT / "workflow" / "schemas" / "result.schema.json"
VERDICT_SCHEMA = ROOT / "workflow" / "schemas" / "verdict.schema.json"
CEILINGS_SCHEMA = ROOT / "workflow" / "schemas" / "ceilings.schema.json"
CONFIG_SCHEMA = ROOT / "workflow" / "schemas" / "config.schema.yaml"


def test_generated_files_are_in_step_with_the_models() -> None:
    stale = [str(path) for path, text in generated_files(ROOT).items() if path.read_text() != text]

    assert stale == [], "run: make schemas"


def test_the_config_readme_explains_every_key() -> None:
    text = (ROOT / "config" / "README.md").read_text()

    for key in [key for kind in (Config, Sweep, Experiment, Privacy) for key in kind.model_fields]:
        assert f"| `{key}` |" in text


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_fit_the_published_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), yaml.safe_load(CONFIG_SCHEMA.read_text()))


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"dtype": "fp16"}, {"bath_size": 1}, {"model": {"layers": 1}}],
)
def test_the_published_config_schema_refuses_what_planning_refuses(change) -> None:
    sweep = {"method": "standard", "batch_size": [1], "model": "tiny", "seq_len": 8} | change

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sweeps": {"s": sweep}}, yaml.safe_load(CONFIG_SCHEMA.read_text()))


@pytest.mark.parametrize("outcome", ["ok", "oom"])
def test_results_fit_the_published_schema(tmp_path, outcome: str) -> None:
    experiment = make_experiment()
    write_synthetic(tmp_path, experiment, outcome=outcome)
    document = json.loads(result_path(tmp_path, "clean", experiment.id, 0).read_text())
    schema = json.loads(RESULT_SCHEMA.read_text())

    jsonschema.validate(document, schema)
    validator = jsonschema.validators.validator_for(schema)(schema)
    for key in document:
        assert not validator.is_valid({k: v for k, v in document.items() if k != key}), key


@pytest.mark.parametrize("passed", [True, False, None])
def test_verdicts_fit_the_published_schema(tmp_path, passed) -> None:
    write_synthetic_verdict(tmp_path, make_experiment(), passed, reason="it differs")
    path = tmp_path / "results" / "verify" / "built-in-standard.json"
    document, schema = json.loads(path.read_text()), json.loads(VERDICT_SCHEMA.read_text())

    jsonschema.validate(document, schema)
    validator = jsonschema.validators.validator_for(schema)(schema)
    for key in document:
        assert not validator.is_valid({k: v for k, v in document.items() if k != key}), key


def test_ceilings_fit_the_published_schema(tmp_path) -> None:
    write_synthetic_ceilings(tmp_path)
    (path,) = (tmp_path / "results" / "ceilings").iterdir()
    document, schema = json.loads(path.read_text()), json.loads(CEILINGS_SCHEMA.read_text())

    jsonschema.validate(document, schema)
    validator = jsonschema.validators.validator_for(schema)(schema)
    for key in document:
        assert not validator.is_valid({k: v for k, v in document.items() if k != key}), key
