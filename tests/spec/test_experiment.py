import hashlib
import json
import re

import pytest
from factory import make_experiment
from pydantic import ValidationError
from snapshots import assert_sentences

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
    "noise_strategy": "independent",
    "accumulation": 1,
    "decoder_len": None,
    "lengths": None,
    "poisson": False,
    "empty_cache_every": None,
    "lora": None,
    "trainable": None,
    "padding": None,
    "parameters_dtype": "float32",
    "trained_dtype": "float32",
    "autocast": True,
    "loss_scale": 1.0,
    "loop": "dpprof",
    "loss": "cross-entropy",
    "loss_dtype": "float32",
    "keep_logits": False,
    "use_cache": False,
    "checkpointed_share": 1.0,
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


def test_a_copy_with_another_field_has_another_id() -> None:
    experiment = make_experiment(batch_size=2)
    before = experiment.id
    copied = experiment.model_copy(update={"batch_size": 4})

    assert (copied.id, experiment.id) == (make_experiment(batch_size=4).id, before)


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


REFUSED = [
    {"batch_size": 0},
    {"batch_size": True},
    {"batch_size": 1.5},
    {"dtype": "fp16"},
    {"noise_multiplier": float("nan")},
    {"model": "../up"},
    {"model": "small\n"},
    {"model": 3},
    {"model": {"vocab_size": 9}},
    {"bath_size": 3},
    {"noise_strategy": "banded-0"},
    {"noise_strategy": "banded-8", "execution": "graph", "device": "cuda"},
    {"memory_limit_bytes": "4 lots"},
    {"memory_limit_bytes": True},
    {"memory_limit_bytes": -5},
    {"seq_len": 10**240},
    {"memory_limit_bytes": 0},
    {"model": {"vocab_size": 10, "d_model": 10, "layers": 1, "heads": 3}},
    {"model": "tiny", "lora": {"rank": 2}},
    {"model": "tiny", "padding": 0.1},
    {"lora": "rank=0"},
    {"lora": {"alpha": 3}},
    {"lora": {"rnk": 3, "rank": 1}},
    {"lora": "16"},
    {"lora": "rank=2,target_modules="},
    {"lora": {"rank": 2, "dropout": 1}},
    {"padding": 1},
    {"padding": True},
    {"trainable": "(("},
    {"trainable": ["x"]},
    {"trainable": {}},
    {"trainable": "lora"},
    {"parameters_dtype": "bfloat16"},
    {"quantization": "gptq"},
    {"quantization": "nf4"},
    {"lora": None, "trainable": None, "quantization": "int8"},
    {"lora": "rank=2", "quantization": "nf4", "dtype": "float64"},
    {"lora": "rank=2", "quantization": "int8", "parallel": "kind=fsdp,world_size=2"},
    {"lora": "rank=2", "model": IN_4_BITS, "quantization": "int8"},
    {"model": GPTQ},
    {"optimizer": "adamw-8bit", "parallel": "kind=fsdp,world_size=2"},
    {"optimizer": "adafactor", "execution": "graph", "device": "cuda"},
    {"parallel": "fsdp"},
    {"parallel": "kind=fsdp"},
    {"parallel": "kind=fsdp,world_size=1"},
    {"parallel": "kind=zero,world_size=2"},
    {"parallel": {"kind": "ddp", "world_size": True}},
    {"parallel": "kind=ddp,world_size=2,ranks=2"},
    {"parallel": "kind=ddp,world_size=2,reshard_after_forward=true"},
    {"dtype": "fp8"},
    {"parallel": "kind=fsdp1,world_size=2"},
    {"lora": "dora"},
    {"lora": "ia3", "quantization": "nf4", "autocast": False}
    | {"dtype": "bfloat16", "parameters_dtype": "bfloat16", "trained_dtype": "bfloat16"},
    {"lora": "rank=2,ia3=true", "method": "flash"},
    {"lora": "rank=2,use_dora=true,dropout=0.1", "method": "flash"},
    {"lora": "rank=2,use_dora=true", "quantization": "nf4", "method": "flash-bk"},
    {"optimizer": "galore"},
    {"optimizer": "adamw-in-backward"},
    {"optimizer": "paged_adamw"},
    {"optimizer": "lion"},
    {"decoder_len": 5},
    {"model": "hf:t5-small", "decoder_len": 5, "padding": 0.3},
    {"optimizer": "paged-adamw-8bit", "parallel": "kind=fsdp,world_size=2"},
    {"accumulation": 0},
    {"attention": "flash_attention_2"},
    {"head": "liger"},
    {"checkpointing": "every-other"},
    {"checkpointing": "offload"},
    {"optimizer": "optimizer_in_bwd"},
    {"padding": "packing"},
    {"padding": "packed", "method": "flash-bk"},
    {"padding": {"packed": True, "fraction": 0.5}, "method": "standard"},
    {"model": {"hf": "tiny-bert", "task": "squad"}},
    {"model": {"kind": "QRNN", "vocab_size": 40, "embedding": 6, "hidden": 5}},
    {"model": {"kind": "GRU", "vocab_size": 40, "hidden": 5}},
    {"model": {"hf": "tiny-llama", "task": "dpo"}},
    {"model": {"hf": "tiny-bart", "task": "automatic-speech-recognition"}},
    {"optimizer": "adamw_bnb_8bit"},
    {"optimizer": "rmsprop"},
    {"checkpointing": "unsloth"},
    {"quantization": "load-in-4bit"},
    {"padding": "group_by_length"},
    {"group_by_length": True},
    {"activation_offloading": True},
    {"energy": True},
    {"lengths": "64"},
    {"lengths": {}},
    {"lengths": {0: 1}},
    {"lengths": "64=0"},
    {"lengths": [[64, 1], [64, 2]]},
    {"lengths": "64=1,512=1"},
    {"lengths": "64=1", "seq_len": None, "accumulation": 2},
    {"poisson": True, "execution": "graph", "device": "cuda"},
    {"poisson": True, "parallel": "kind=ddp,world_size=2"},
    {"empty_cache_every": 10},
    {"poisson_sampling": True},
    {"bucket_by_length": True},
]


def refusal_of(fields: dict[str, object]) -> str:
    model = "hf:tiny-llama" if fields.keys() & FINE_TUNING else "small"
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(COMPLETE | {"model": model} | fields)
    return str(explain(caught.value, Experiment))


def test_bad_input_is_one_sentence() -> None:
    assert_sentences("spec/experiment", refusal_of, REFUSED)


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
CONTRADICTIONS = [
    {"parameters_dtype": "float16"},
    {"dtype": "bfloat16", "parameters_dtype": "float16"},
    SHORT | {"parameters_dtype": "float32"},
    SHORT | {"optimizer": "adamw"},
    {"autocast": False},
    {"autocast": False, "dtype": "float16"},
    SHORT | {"autocast": False, "trained_dtype": "float32"},
    SHORT | {"autocast": False, "parallel": "kind=fsdp,world_size=2"},
    {"loss_scale": 2},
    SHORT | {"loss_scale": 1000},
    {"keep_logits": True, "head": "chunked"},
    {"loop": "hf-trainer"},
    {"loop": "hf-manuel"},
    {"loop": "torchtune", "keep_logits": True},
    {"loop": "torchtune", "head": "chunked"},
    {"loop": "torchtune", "model": "opacus-cnn", "seq_len": None},
    {"loss_dtype": "float16"},
    {"keep_logits": "always"},
    {"use_cache": True},
    {"checkpointed_share": 0.5},
    {"checkpointed_share": 0, "checkpointing": "reentrant"},
    {"checkpointing": "every-2"},
]


def test_number_formats_that_contradict_each_other_are_refused() -> None:
    assert_sentences("spec/formats", refusal_of, CONTRADICTIONS)


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
