"""Attention on CUDA: which kernel, what it saves and takes, and what an estimate says of it."""

import pytest
import torch
from factory import make_experiment
from memory_steps import costs, trace_call, workspaces
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpprof.predict.estimate import estimate
from dpprof.predict.memory.attention_backends import AttentionCall, AttentionGpu, choose_backend

BF16, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
NEWER, OLDER = 92000, 91002


def ask(dtype=BF16, width=64, queries=32, keys=32, **named) -> AttentionCall:
    q, k = torch.ones(2, 3, queries, width, dtype=dtype), torch.ones(2, 3, keys, width, dtype=dtype)
    return AttentionCall(q, k, k, **named)


MASK = torch.ones(32, 32, dtype=torch.bool)
CHOICES = {
    "ampere": (ask(), AttentionGpu("8.0", NEWER), "flash"),
    "ada": (ask(), AttentionGpu("8.9", NEWER), "flash"),
    "hopper": (ask(), AttentionGpu("9.0", NEWER), "cudnn"),
    "hopper, float16": (ask(HALF), AttentionGpu("9.0", NEWER), "cudnn"),
    "hopper, cuDNN of PyTorch's wheel": (ask(), AttentionGpu("9.0"), "cudnn"),
    "hopper, older cuDNN": (ask(), AttentionGpu("9.0", OLDER), "flash"),
    "blackwell": (ask(), AttentionGpu("10.0", NEWER), "cudnn"),
    "blackwell's second": (ask(), AttentionGpu("10.3", NEWER), "flash"),
    "blackwell for desks": (ask(), AttentionGpu("12.0", NEWER), "flash"),
    "float32": (ask(FLOAT), AttentionGpu("9.0", NEWER), "efficient"),
    "float64": (ask(DOUBLE), AttentionGpu("9.0", NEWER), "math"),
    "a mask on hopper": (ask(mask=MASK), AttentionGpu("9.0", NEWER), "cudnn"),
    "a mask on ampere": (ask(mask=MASK), AttentionGpu("8.0", NEWER), "efficient"),
    "wide heads on hopper": (ask(width=256), AttentionGpu("9.0", NEWER), "cudnn"),
    "wide heads on blackwell": (ask(width=256), AttentionGpu("10.0", NEWER), "flash"),
    "odd heads": (ask(width=20), AttentionGpu("9.0", NEWER), "flash"),
    "odd heads in float32": (ask(FLOAT, width=6), AttentionGpu("9.0", NEWER), "math"),
    "one token": (ask(queries=1, keys=1), AttentionGpu("9.0", NEWER), "flash"),
    "turing": (ask(HALF), AttentionGpu("7.5"), "efficient"),
    "volta, a mask": (ask(HALF, mask=MASK), AttentionGpu("7.0"), "efficient"),
    "turing in bfloat16": (ask(), AttentionGpu("7.5"), "math"),
    "turing, odd heads": (ask(HALF, width=20), AttentionGpu("7.5"), "math"),
    "turing, odd heads in float32": (ask(FLOAT, width=6), AttentionGpu("7.5"), "efficient"),
    "a causal rectangle on ampere": (ask(keys=8, causal=True), AttentionGpu("8.0"), "efficient"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_kernel_is_the_one_that_pytorch_prefers(case) -> None:
    asked, gpu, backend = CHOICES[case]

    assert choose_backend(asked, gpu)[0] == backend


@pytest.mark.parametrize("cudnn", [NEWER, NEWER + 400, None])
def test_a_choice_says_why_and_the_same_for_each_new_cudnn(cudnn) -> None:
    """So builds of PyTorch with CUDA and without predict the same of a GPU that is not here."""
    _, why = choose_backend(ask(width=20), AttentionGpu("9.0", cudnn))
    assert why == (
        "cuDNN's is preferred on compute capability 9.0, if cuDNN is newer than 9.15; "
        "cudnn needs heads of a multiple of 8"
    )


def test_a_choice_against_cudnn_says_why() -> None:
    assert choose_backend(ask(), AttentionGpu("9.0", 91500))[1] == (
        "flash attention is preferred on compute capability 9.0 with cuDNN 91500"
    )
    assert choose_backend(ask(), AttentionGpu("8.0"))[1] == (
        "flash attention is preferred on compute capability 8.0"
    )


def test_what_is_switched_off_does_not_run(monkeypatch) -> None:
    with nn.attention.sdpa_kernel([nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choose_backend(ask(), AttentionGpu("9.0", NEWER))[0] == "efficient"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    put_back = choose_backend(ask(), AttentionGpu("9.0", NEWER))
    assert put_back == ("flash", "TORCH_CUDNN_SDPA_DEPRIORITIZED is set")


B, H, T, K = 2, 3, 64, 16
attend = nn.functional.scaled_dot_product_attention


def make_heads(dtype, heads=H) -> Tensor:
    return torch.ones(B, heads, T, K, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("target", "dtype", "op"),
    [
        ("a100", FLOAT, "efficient_attention"),
        ("a100", BF16, "flash_attention"),
        ("h200", FLOAT, "efficient_attention"),
        ("h200", BF16, "cudnn_attention"),
        ("b200", BF16, "cudnn_attention"),
    ],
)
def test_forward_saves_the_log_sums_and_backward_runs_the_same_kernel(target, dtype, op) -> None:
    def run() -> None:
        q, k, v = (make_heads(dtype) for _ in range(3))
        attend(q, k, v, is_causal=True).sum().backward()
        assert q.grad.shape == q.shape

    recorder = trace_call(target, run)
    name = f"_scaled_dot_product_{op}"
    found = {one.op: one.flops for one in costs(recorder) if one.family == "attention"}
    # Dropout's seed and offset take a block each.
    saved = [B * H * T * K * dtype.itemsize, 4 * B * H * T, 512, 512]
    assert sorted(s.nbytes for s in recorder.storages if s.op == name) == sorted(saved)
    product = 2 * B * H * T * T * K
    assert found == {name: 2 * product, f"{name}_backward": 5 * product}


def test_cudnns_backward_takes_a_float32_gradient_of_the_queries_at_least() -> None:
    def run() -> None:
        q = make_heads(BF16)
        attend(q, q, q).sum().backward()

    taken = workspaces(trace_call("h200", run), "cudnn_attention_backward")
    assert taken == [4 * B * H * T * width for width in (K, 1)]


@pytest.mark.parametrize(
    ("target", "dtype", "op"),
    [
        ("h200", BF16, "_scaled_dot_product_cudnn_attention"),
        ("a100", BF16, "_scaled_dot_product_flash_attention"),
        ("a100", FLOAT, "bmm"),  # neither flash nor efficient attention
    ],
)
def test_grouped_queries_run_where_the_kernel_takes_them(target, dtype, op) -> None:
    def run() -> None:
        q, k = make_heads(dtype, 4 * H), make_heads(dtype)
        attend(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
        assert k.grad.shape == k.shape

    recorder = trace_call(target, run)
    ran = {one.op for one in costs(recorder)}
    assert op in ran
    assert {one for one in ran if one.endswith("attention")} == ({op} if op != "bmm" else set())
    by_head = B * 4 * H * T * K * dtype.itemsize
    assert workspaces(recorder).count(by_head) == (2 if "flash" in op else 0)


def test_autocast_casts_before_a_kernel_is_chosen_also_where_backward_computes_again() -> None:
    def run() -> None:
        q = make_heads(FLOAT)
        with torch.autocast("cpu", dtype=BF16):
            y = checkpoint(lambda q: attend(q, q, q, is_causal=True), q, use_reentrant=False)
        y.sum().backward()
        assert (y.dtype, q.grad.dtype) == (BF16, FLOAT)

    ran = [one.op for one in costs(trace_call("a100", run))]
    assert ran.count("_scaled_dot_product_flash_attention") == 2
    assert ran.count("_scaled_dot_product_flash_attention_backward") == 1


def test_a_mask_of_booleans_becomes_one_of_numbers_and_rules_flash_attention_out() -> None:
    def run() -> None:
        q = make_heads(BF16)
        attend(q, q, q, torch.ones(B, 1, T, T, dtype=torch.bool))

    sizes = {one.op: one.requested for one in trace_call("a100", run).storages}
    assert sizes["where"] == 2 * B * T * T
    assert "_scaled_dot_product_efficient_attention" in sizes


def assume(**fields) -> dict[str, str]:
    model = {"vocab_size": 50, "d_model": 16, "layers": 1, "heads": 2}
    experiment = make_experiment(model=model, method="standard", device="cuda", **fields)
    assumed = estimate(experiment, lambda _: None).memory.assumed
    assert assumed.pop("blocks").startswith("all were traced: ")
    return assumed


def test_an_estimate_says_what_it_assumes_of_attention() -> None:
    hopper = assume(target="h200", dtype="bfloat16")
    backward = "workspace of _scaled_dot_product_cudnn_attention_backward"
    assert set(hopper) == {"attention: cudnn", backward}
    assert hopper["attention: cudnn"].startswith("cuDNN's is preferred on compute capability 9.0")
    assert "lower bound" in hopper[backward]

    assert assume(target="a100", dtype="bfloat16") == {
        "attention: flash": "flash attention is preferred on compute capability 8.0"
    }
    assert set(assume(target="h200", dtype="float32")) == {"attention: efficient"}
