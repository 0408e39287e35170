"""Every kind of Hugging Face model is verified on a small one; refusals are told as such."""

import pytest
import torch
from torch.nn import functional

from dpprof.ask.questions import make_experiment
from dpprof.experiments.config import registry
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.experiments.records.verdict import TOLERANCE, judge
from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.measure.verification.subjects import describe_case, prepare
from dpprof.measure.verification.verify import verify, verify_case

pytest.importorskip("transformers")
pytest.importorskip("peft")

MODELS = [
    "hf:tiny-gpt2",
    "hf:tiny-llama",
    "{hf: tiny-llama, tie_word_embeddings: true}",
    "hf:tiny-qwen2",
    "hf:tiny-mistral",
    "hf:tiny-gemma2",
    "hf:tiny-gpt-neox",
    "hf:tiny-opt",
    "hf:tiny-phi",
]
KINDS = [{}, {"padding": "0.3"}, {"lora": "rank=8"}, {"lora": "rank=8", "padding": "0.3"}]
OWN = ("flash", "flash-bk", "microbatch")
BIOGPT = (
    "{hf: biogpt, model_type: biogpt, vocab_size: 50, hidden_size: 16, intermediate_size: 32, "
    "num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 32}"
)


def stand_in(model: str, method: str = "flash-bk", **fields: str) -> StandIn:
    sizes = {"batch_size": "2", "seq_len": "8", "device": "cpu"}
    found = StandIn.of(make_experiment({"model": model, "method": method, **sizes, **fields}))
    assert found is not None
    return found


def case(model: str, method: str, scenario: str, **fields: str):
    with lift_float32():
        return verify_case(stand_in(model, **fields), method, "sdpa", 4, scenario)


@pytest.mark.parametrize(
    ("model", "fields", "scenario"),
    [
        ("hf:tiny-gpt2", {"lora": "rank=8"}, "plain"),
        ("{hf: tiny-llama, tie_word_embeddings: true}", {}, "plain"),
        ("hf:tiny-gemma2", {"lora": "rank=8", "padding": "0.3"}, "other padding"),
        ("hf:tiny-gpt-neox", {"padding": "0.3"}, "ignored labels"),
    ],
)
def test_our_own_method_is_verified(model, fields, scenario) -> None:
    found = case(model, "flash-bk", scenario, **fields)

    assert (found.outcome, found.reason) == ("passed", None)
    assert found.references == ["microbatch", "torch.func"]
    assert found.max_relative_error <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "method", "words"),
    [
        ("hf:tiny-gpt2", "opacus-ew", "Opacus: Expanded Weights encountered but cannot handle"),
        ("hf:tiny-gpt2", "opacus-ghost", "Opacus: Parameter tying is not supported with Ghost"),
        (BIOGPT, "opacus-hooks", "Opacus: a trained layer takes an argument of type int"),
        ("hf:tiny-opt", "opacus-ew", "PyTorch's expanded weights give the row of an embedding's"),
    ],
)
def test_a_refusal_is_unsupported_with_its_reason(model, method, words) -> None:
    found = case(model, method, "plain")

    assert found.outcome == "unsupported"
    assert found.reason.startswith(words)


@pytest.mark.parametrize("scenario", ["plain", "frozen"])
@pytest.mark.parametrize(
    ("method", "tied"),
    [("opacus-per-layer", True), ("opacus-fast-gradient-clipping", True), ("opacus-ghost", False)],
)
def test_opt_s_lookups_of_tokens_and_positions_are_clipped_exactly(method, tied, scenario) -> None:
    found = case(f"{{hf: tiny-opt, tie_word_embeddings: {tied}}}", method, scenario)

    assert (found.outcome, found.reason) == ("passed", None)


def test_padding_is_there_and_its_tokens_differ_between_the_scenarios() -> None:
    experiment = describe_case(stand_in("hf:tiny-gpt2", padding="0.3"), "flash-bk", "sdpa", 4)
    plain, other = (prepare(experiment, scenario).batch for scenario in ("plain", "other padding"))
    padding = plain.mask_BT == 0

    assert padding.any()
    assert not torch.equal(plain.x[padding], other.x[padding])
    assert torch.equal(plain.x[~padding], other.x[~padding])
    assert torch.equal(plain.labels, other.labels)


def test_a_batch_of_one_padded_sample_has_tokens_in_the_vocabulary() -> None:
    experiment = describe_case(stand_in("hf:tiny-gpt2", padding="0.3"), "flash-bk", "sdpa", 1)
    batch = prepare(experiment).batch

    assert batch.x.min() >= 0
    assert (batch.labels[batch.mask_BT == 0] == -100).all()


def test_only_the_libraries_float32_is_lifted() -> None:
    library = {"torch": torch, "functional": functional, "__name__": "transformers.models.x"}
    code = (
        "def run(x):\n"
        "    same = x.to(torch.float32), x.float(), x.to(dtype=torch.float32)\n"
        "    return *same, functional.softmax(x, -1, dtype=torch.float32)\n"
    )
    exec(code, library)  # noqa: S102 (as if a library had called)
    x = torch.ones(3, dtype=torch.float64)

    with lift_float32():
        lifted, own = library["run"](x), x.float()
    assert {one.dtype for one in lifted} == {torch.float64}
    assert own.dtype == torch.float32
    assert {one.dtype for one in library["run"](x)} == {torch.float32}


def test_float32_is_lifted_in_what_backward_computes_again() -> None:
    library = {"torch": torch, "__name__": "transformers.models.x"}
    exec("def cast(x):\n    return x.to(torch.float32)\n", library)  # noqa: S102
    seen = []
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(library["cast"](gradient).dtype))

    with lift_float32():
        x.sum().backward()
    assert seen == [torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", registry.names("methods"))
def test_every_method_passes_or_says_why_not(method, model, fields) -> None:
    cases = verify(stand_in(model, **fields).canonical, method).cases
    passed, reason = judge(cases)

    assert passed is not False, reason
    if method in OWN:
        assert (passed, reason) == (True, None)
        assert {one.outcome for one in cases} <= {"passed", "unsupported"}
    elif passed is None:
        assert reason.startswith("attention sdpa")
        assert "unknown" not in {one.outcome for one in cases}
