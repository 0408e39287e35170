import hashlib
import json
import re

import pytest
from factory import make_experiment
from pydantic import ValidationError
from snapshots import assert_reviewed, assert_sentences

from dpprof.experiments.config.experiment import Experiment, read_spec
from dpprof.experiments.config.validation import InputError, explain

COMPLETE = {
    "model": "small",
    "method": "opacus-ghost",
    "batch_size": 8,
    "seq_len": 1024,
    "dtype": "float32",
    "optimizer": "adamw",
    "attention": "sdpa",
    "checkpointing": "none",
    "device": "cpu",
    "target": None,
    "max_grad_norm": 1.0,
    "noise_multiplier": 1.0,
    "learning_rate": 0.001,
    "seed": 0,
    "warmup_steps": 3,
    "timed_steps": 10,
    "cpu_threads": None,
    "timeout_s": 900.0,
    "memory_limit_bytes": None,
}


FINE_TUNING = {"lora", "trainable", "padding", "parameters_dtype"}


def test_a_copy_with_another_field_has_another_id() -> None:
    experiment = make_experiment(batch_size=2)
    before = experiment.id
    copied = experiment.model_copy(update={"batch_size": 4})

    assert (copied.id, experiment.id) == (make_experiment(batch_size=4).id, before)


def test_id_is_a_readable_stem_and_the_digest_of_the_canonical_json() -> None:
    experiment = Experiment.model_validate(COMPLETE)
    spec = json.loads(experiment.canonical)
    digest = hashlib.sha256(experiment.canonical.encode()).hexdigest()

    assert_reviewed("spec/canonical", json.dumps(spec, indent=4, sort_keys=True) + "\n")
    assert experiment.canonical == json.dumps(spec, sort_keys=True, separators=(",", ":"))
    assert COMPLETE.items() <= spec.items()
    assert experiment.digest == digest
    assert experiment.id == f"small-opacus-ghost-b8-t1024-{digest[:8]}"


def test_defaults_are_spelled_out_in_the_spec() -> None:
    required = {k: COMPLETE[k] for k in ("model", "method", "batch_size", "seq_len", "device")}

    assert Experiment.model_validate(required).canonical == make_experiment(**COMPLETE).canonical


@pytest.mark.parametrize("field", sorted(COMPLETE))
def test_every_field_changes_the_digest(field: str) -> None:
    other = {
        "model": "tiny",
        "method": "standard",
        "dtype": "float64",
        "optimizer": "sgd",
        "attention": "eager",
        "checkpointing": "reentrant",
        "device": "cuda",
        "cpu_threads": 2,
        "memory_limit_bytes": 2**30,
        "target": "cpu",
    }
    changed = COMPLETE | {field: other.get(field) or COMPLETE[field] + 1}

    assert Experiment.model_validate(changed).digest != Experiment.model_validate(COMPLETE).digest


def test_the_same_value_written_otherwise_is_the_same_experiment() -> None:
    written = COMPLETE | {"batch_size": "8", "timeout_s": 900, "seq_len": 1024.0}
    limited = COMPLETE | {"memory_limit_bytes": "2GiB"}

    assert Experiment.model_validate(written).digest == Experiment.model_validate(COMPLETE).digest
    assert Experiment.model_validate(limited).memory_limit_bytes == 2 * 2**30


def refusal_of(fields: dict[str, object]) -> str:
    model = "hf:tiny-llama" if fields.keys() & FINE_TUNING else "small"
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(COMPLETE | {"model": model} | fields)
    return str(explain(caught.value, Experiment))


def test_bad_input_is_one_sentence() -> None:
    assert_sentences("spec/experiment", refusal_of)


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("4000", 4000),
        ("4.0", 4),
        ("4GiB", 2**32),
        (" 1.5 kb ", 1500),
        (".5GiB", 2**29),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_a_size_has_the_bytes_that_its_unit_says(size: object, size_bytes: int) -> None:
    experiment = Experiment.model_validate(COMPLETE | {"memory_limit_bytes": size})

    assert experiment.memory_limit_bytes == size_bytes


@pytest.mark.parametrize(
    "key", ["batch_size", "timed_steps", "seed", "timeout_s", "memory_limit_bytes"]
)
@pytest.mark.parametrize("value", ["4,000", "1-2", "100%", "9" * 400, 10**400, "1h", "0x10", ""])
def test_a_count_a_duration_and_a_size_are_read_as_a_whole_or_refused(
    key: str, value: object
) -> None:
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(COMPLETE | {key: value})

    sentence = str(explain(caught.value, Experiment))
    assert re.match(rf"{key}: .* is not allowed; it must be ", sentence)
    assert len(sentence) < 250


def test_a_spec_file_is_read_back(tmp_path) -> None:
    experiment = make_experiment()
    path = tmp_path / f"{experiment.id}.json"
    path.write_text(experiment.canonical)

    assert read_spec(path) == experiment


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (make_experiment(batch_size=3).canonical, "was edited: its content belongs to custom-stan"),
        ('{"model": "small"}', r"\.json: is not the spec of an experiment \(missing"),
    ],
)
def test_an_edited_file_and_no_spec_at_all_are_refused(tmp_path, text, said) -> None:
    path = tmp_path / f"{make_experiment().id}.json"
    path.write_text(text)

    with pytest.raises(InputError, match=said):
        read_spec(path)


SHORT = {"dtype": "float16", "parameters_dtype": "float16", "trained_dtype": "float16"}
SHORT |= {"optimizer": "sgd"}


def test_number_formats_that_contradict_each_other_are_refused() -> None:
    assert_sentences("spec/formats", refusal_of)


def test_formats_change_the_id_and_their_defaults_do_not() -> None:
    usual = {"autocast": True, "loss_scale": 1, "trained_dtype": "float32", "keep_logits": False}

    assert make_experiment(**usual).id == make_experiment().id
    assert make_experiment(**SHORT).id != make_experiment(**SHORT | {"loss_scale": 2}).id
    assert make_experiment(**SHORT).autocast_dtype == "float16"
    assert make_experiment(**SHORT, autocast=False).autocast_dtype is None


def test_a_loop_says_what_is_not_said_and_no_more() -> None:
    kept = make_experiment(loop="opacus-tutorial")
    freed = make_experiment(loop="opacus-tutorial", keep_logits=False)

    assert (kept.loss_dtype, kept.keep_logits) == ("logits", "next-forward")
    assert (freed.loss_dtype, freed.keep_logits) == ("logits", False)
