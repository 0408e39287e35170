import hashlib
import json
import re

import pytest
from factory import make_experiment
from pydantic import ValidationError

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
ELSE_DEFAULT = {
    "wait_for_idle_gpu_s": 0.0,
    "busy_gpu": "run",
    "lora": None,
    "trainable": None,
    "padding": None,
    "parameters_dtype": "float32",
    "trained_dtype": "float32",
    "autocast": True,
    "loss_scale": 1.0,
    "keep_logits": False,
    "parallel": None,
    "execution": "eager",
    "head": "logits",
    "image_size": None,
    "quantization": None,
}
FINE_TUNING = {"lora", "trainable", "padding", "parameters_dtype"}
GPTQ = {"hf": "tiny-llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IN_4_BITS = {"hf": "tiny-llama", "quantization_config": NF4}


def test_id_is_a_readable_stem_and_the_digest_of_the_canonical_json() -> None:
    text = json.dumps(COMPLETE | ELSE_DEFAULT, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()

    experiment = Experiment.model_validate(COMPLETE)

    assert experiment.canonical == text
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


def test_a_mapping_of_dimensions_has_the_stem_custom() -> None:
    dimensions = {"vocab_size": 10, "d_model": 8, "layers": 1, "heads": 4}

    assert make_experiment(model=dimensions).id.startswith("custom-standard-b2-t4-")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batch_size": 0}, "batch_size: 0 is not allowed; it must be greater than or equal to 1"),
        ({"batch_size": True}, "batch_size: True is not allowed; it must be a number"),
        ({"batch_size": 1.5}, "batch_size: 1.5 is not allowed; it must be a valid integer"),
        ({"dtype": "fp16"}, "dtype: 'fp16' is not allowed; it must be 'float32', 'tf32', 'b"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier: nan is not allowed; it must be a"),
        ({"model": "../up"}, "model: '../up' is not allowed; it must match pattern"),
        ({"model": "small\n"}, r"model: 'small\n' is not allowed; it must match pattern"),
        ({"model": 3}, "model: 3 is not allowed; it must be a model's name, hf:NAME, or a mapping"),
        ({"model": {"vocab_size": 9}}, "model: missing d_model, layers, heads"),
        (
            {"bath_size": 3},
            "unknown key 'bath_size'; did you mean 'batch_size'? allowed: attention",
        ),
        (
            {"memory_limit_bytes": "4 lots"},
            "memory_limit_bytes: '4 lots' is not allowed; it must be",
        ),
        ({"memory_limit_bytes": True}, "memory_limit_bytes: True is not allowed; it must be a"),
        ({"memory_limit_bytes": -5}, "memory_limit_bytes: -5 is not allowed; it must be a number"),
        ({"seq_len": 10**240}, "seq_len: "),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes: 0 is not allowed; it must be a num"),
        (
            {"model": {"vocab_size": 10, "d_model": 10, "layers": 1, "heads": 3}},
            "heads must divide d_model, and 3 does not divide 10",
        ),
        ({"model": "tiny", "lora": {"rank": 2}}, "lora requires a Hugging Face model"),
        ({"model": "tiny", "padding": 0.1}, "padding requires a Hugging Face model"),
        ({"lora": "rank=0"}, "lora.rank: '0' is not allowed; it must be greater than or equal"),
        ({"lora": {"alpha": 3}}, "lora: missing rank"),
        ({"lora": {"rnk": 3, "rank": 1}}, "unknown key 'rnk' in lora; did you mean 'rank'?"),
        ({"lora": "16"}, "it must be a mapping, or pairs such as rank=16,alpha=32"),
        ({"lora": "rank=2,target_modules="}, "it must be all-linear, or at least one module"),
        ({"lora": {"rank": 2, "dropout": 1}}, "lora.dropout: 1 is not allowed"),
        ({"padding": 1}, "padding.fraction: 1 is not allowed; it must be less than 1"),
        ({"padding": True}, "padding"),
        ({"trainable": "(("}, "or a regular expression, and missing )"),
        ({"trainable": ["x"]}, "trainable: ['x'] is not allowed; it must be a valid string"),
        ({"trainable": {}}, "trainable: {} is not allowed; it must be a valid string"),
        ({"trainable": "lora"}, "trainable lora requires lora, such as lora: {rank: 16}"),
        ({"parameters_dtype": "bfloat16"}, "requires dtype bfloat16, but dtype is float32"),
        ({"quantization": "gptq"}, "quantization: 'gptq' is not allowed; it must be 'nf4', 'nf4-"),
        ({"quantization": "nf4"}, "quantization requires a Hugging Face model, as hf:NAME"),
        (
            {"lora": None, "trainable": None, "quantization": "int8"},
            "quantization int8 requires lora, such as lora: {rank: 16}: a quantised weight cannot",
        ),
        (
            {"lora": "rank=2", "quantization": "nf4", "dtype": "float64"},
            "quantization requires a dtype of at most 32 bits, and dtype is float64",
        ),
        (
            {"lora": "rank=2", "quantization": "nf4", "parallel": "kind=fsdp,world_size=2"},
            "quantization works with parallel ddp, and not with fsdp",
        ),
        (
            {"lora": "rank=2", "model": IN_4_BITS, "quantization": "int8"},
            "the model's quantization_config says nf4 already; leave quantization out",
        ),
        ({"model": GPTQ}, "its weights are quantised by gptq, and adapters are trained here over"),
        (
            {"optimizer": "adamw-8bit", "parallel": "kind=fsdp,world_size=2"},
            "optimizer adamw-8bit keeps states of whole parameters, and fsdp shards them",
        ),
        (
            {"optimizer": "adafactor", "execution": "graph", "device": "cuda"},
            "optimizer adafactor counts its steps on the host, which a CUDA graph would not repeat",
        ),
        (
            {"parallel": "fsdp"},
            "parallel: 'fsdp' is not allowed; it must be a mapping, or pairs such as ",
        ),
        ({"parallel": "kind=fsdp"}, "parallel: missing world_size"),
        ({"parallel": "kind=fsdp,world_size=1"}, "it must be greater than or equal to 2"),
        (
            {"parallel": "kind=zero,world_size=2"},
            "parallel.kind: 'zero' is not allowed; it must be 'ddp', 'fsdp' or ",
        ),
        (
            {"parallel": {"kind": "ddp", "world_size": True}},
            "it must be a number, not true or false",
        ),
        (
            {"parallel": "kind=ddp,world_size=2,ranks=2"},
            "unknown key 'ranks' in parallel; allowed: gpus_per_node, kind, ",
        ),
        (
            {"parallel": "kind=ddp,world_size=2,reshard_after_forward=true"},
            "reshard_after_forward belongs to kind fsdp, and kind is ddp",
        ),
    ],
)
def test_bad_input_is_one_sentence(fields: dict[str, object], sentence: str) -> None:
    model = "hf:tiny-llama" if fields.keys() & FINE_TUNING else "small"
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(COMPLETE | {"model": model} | fields)

    told = str(explain(caught.value, Experiment))
    assert sentence in told
    assert "\n" not in told


@pytest.mark.parametrize(
    "size",
    [
        "4,000MiB",
        "79,1GiB",
        "4-8GiB",
        "100%",
        "4GiB; rm -rf /",
        "9" * 400,
        10**400,
        "8EiB",
        4.5,
        "4.5",
        "4.5 B",
    ],
)
def test_a_size_is_read_as_a_whole_or_refused(size: object) -> None:
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(COMPLETE | {"memory_limit_bytes": size})

    sentence = str(explain(caught.value, Experiment))
    assert sentence.startswith("memory_limit_bytes: ")
    assert sentence.endswith(
        " is not allowed; it must be a number of bytes above 0 and below 8EiB, or one with a unit, "
        "such as 4GiB"
    )
    assert len(sentence) < 250


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


@pytest.mark.parametrize("key", ["batch_size", "timed_steps", "seed", "timeout_s"])
@pytest.mark.parametrize("value", ["4,000", "1-2", "100%", "9" * 400, 10**400, "1h", "0x10", ""])
def test_a_count_and_a_duration_are_read_as_a_whole_or_refused(key: str, value: object) -> None:
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


def test_an_edited_spec_file_is_refused(tmp_path) -> None:
    path = tmp_path / f"{make_experiment().id}.json"
    path.write_text(make_experiment(batch_size=3).canonical)

    with pytest.raises(InputError, match=r"was edited: its content belongs to custom-standard-b3"):
        read_spec(path)


def test_a_spec_that_is_no_spec_is_refused(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"model": "small"}')

    with pytest.raises(InputError, match=r"x\.json: is not the spec of an experiment \(missing"):
        read_spec(path)


SHORT = {"dtype": "float16", "parameters_dtype": "float16", "trained_dtype": "float16"}
SHORT |= {"optimizer": "sgd"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parameters_dtype": "float16"}, "requires dtype float16, but dtype is float32"),
        ({"dtype": "bfloat16", "parameters_dtype": "float16"}, "but dtype is bfloat16"),
        (SHORT | {"parameters_dtype": "float32"}, "requires parameters_dtype float16"),
        (SHORT | {"optimizer": "adamw"}, "trained_dtype float16 requires optimizer sgd"),
        ({"autocast": False}, "autocast false requires dtype bfloat16 or float16"),
        ({"autocast": False, "dtype": "float16"}, "requires parameters_dtype float16"),
        (SHORT | {"autocast": False, "trained_dtype": "float32"}, "or adapters that alone are"),
        (SHORT | {"autocast": False, "parallel": "kind=fsdp,world_size=2"}, "with fsdp"),
        ({"loss_scale": 2}, "loss_scale requires dtype float16, but dtype is float32"),
        (SHORT | {"loss_scale": 1000}, "must be a power of two from 1 to 2^32, .* is 1000"),
        ({"keep_logits": True, "head": "chunked"}, "keep_logits requires head logits"),
    ],
)
def test_number_formats_that_contradict_each_other_are_refused(fields, said) -> None:
    with pytest.raises(ValidationError, match=said.replace("^", r"\^")):
        make_experiment(**fields)


def test_formats_change_the_id_and_their_defaults_do_not() -> None:
    usual = {"autocast": True, "loss_scale": 1, "trained_dtype": "float32", "keep_logits": False}

    assert make_experiment(**usual).id == make_experiment().id
    assert make_experiment(**SHORT).id != make_experiment(**SHORT | {"loss_scale": 2}).id
    assert make_experiment(**SHORT).autocast_dtype == "float16"
    assert make_experiment(**SHORT, autocast=False).autocast_dtype is None
