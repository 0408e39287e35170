import json
from functools import partial
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

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.parallel import Parallel
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.sweep import Config, Sweep
from dpprof.experiments.records.schemas import generated_files

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "workflow" / "schemas"
CONFIG_SCHEMA = yaml.safe_load((SCHEMAS / "config.schema.yaml").read_text())
MICRO = make_experiment()


def test_generated_files_are_in_step_with_the_models() -> None:
    stale = [str(path) for path, text in generated_files(ROOT).items() if path.read_text() != text]

    assert stale == [], "run: make schemas"


def test_the_config_readme_explains_every_key() -> None:
    text = (ROOT / "config" / "README.md").read_text()

    for key in [key for kind in (Config, Sweep, Experiment, Privacy) for key in kind.model_fields]:
        assert f"| `{key}` |" in text


CONFIGS = sorted({*(ROOT / "config").rglob("*.yaml")} - {ROOT / "config" / "learning.yaml"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_configs_fit_the_published_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), CONFIG_SCHEMA)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"dtype": "fp16"}, {"bath_size": 1}, {"model": {"layers": 1}}],
)
def test_the_published_config_schema_refuses_what_planning_refuses(change) -> None:
    sweep = {"method": "standard", "batch_size": [1], "model": "tiny", "seq_len": 8} | change

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sweeps": {"s": sweep}}, CONFIG_SCHEMA)


FILES = [
    *(
        ("result", "clean/*", partial(write_synthetic, experiment=MICRO, outcome=outcome))
        for outcome in ("ok", "oom")
    ),
    *(
        ("verdict", "verify/*", partial(write_synthetic_verdict, experiment=MICRO, passed=passed))
        for passed in (True, False, None)
    ),
    ("ceilings", "ceilings/*", write_synthetic_ceilings),
]


@pytest.mark.parametrize(("name", "pattern", "write"), FILES)
def test_files_fit_the_published_schema(tmp_path, name: str, pattern: str, write) -> None:
    write(tmp_path)
    (path,) = (tmp_path / "results").glob(pattern)
    document = json.loads(path.read_text())
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())

    jsonschema.validate(document, schema)
    # Every key is always there.
    assert set(document) == set(schema["required"])


@pytest.mark.parametrize(("part", "key"), [(Parallel, "world_size"), (Architecture, "hf")])
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_parts_that_leave_keys_out_are_described(part, key, mode) -> None:
    described = part.model_json_schema(mode=mode)

    assert key in described["properties"]
    assert key in described["required"]
