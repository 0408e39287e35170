"""Both kernels square the norms of the gradients that einsum would build, in float64.

Every case runs under Triton's interpreter, in a process of its own, and again compiled where there
is a GPU.
"""

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
from products import one_in
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpprof.private.norms.rounding import gram_slack

MISSING = "the extra dpprof[triton] is not installed"
KERNELS = ["gram_squares", "product_squares"]
FEW = 5
"""Programs that a batch's tiles are shared among, where each shall have many to go through."""

# Tensor cores add up float32 with truncation, hence the tolerance for 16 bits on a GPU.
TOLERANCES = {"interpreter": {2: 1e-5, 4: 1e-5}, "cuda": {2: 1e-4, 4: 1e-5}}

VIEWS = {
    "as it is": lambda a_BTK: a_BTK,
    "tokens first": lambda a_BTK: a_BTK.transpose(0, 1).contiguous().transpose(0, 1),
    "features before tokens": lambda a_BTK: a_BTK.mT.contiguous().mT,
    "every other feature": lambda a_BTK: a_BTK.repeat_interleave(2, dim=2)[..., ::2],
    "slice of a wider tensor": lambda a_BTK: torch.nn.functional.pad(a_BTK, (3, 5))[..., 3:-5],
    "one sample for all": lambda a_BTK: a_BTK[:1].expand(a_BTK.shape),
    "one token for all": lambda a_BTK: a_BTK[:, :1].expand(a_BTK.shape),
    "one number for all": lambda a_BTK: a_BTK[:1, :1, :1].expand(a_BTK.shape),
}


def draw(B: int, T: int, d: int, p: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(B + T + d + p)
    x_BTd = torch.randn(B, T, d, generator=random)
    g_BTp = torch.randn(B, T, p, generator=random)
    return x_BTd.to(dtype), g_BTp.to(dtype)


def squares(x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    gradients_Bdp = torch.einsum("btd,btp->bdp", x_BTd.double(), g_BTp.double())
    return gradients_Bdp.square().sum(dim=(1, 2))


def call(device, launcher, *arguments, patched=None, **options):
    """Launch a kernel, in whichever process; return what it returned, and its arguments by then."""
    from dpprof.private.norms import triton_launch, tuning  # noqa: PLC0415

    moved = tree_map_only(Tensor, lambda each: each.to(device), arguments)
    with mock.patch.dict(vars(tuning), patched or {}):
        returned = getattr(triton_launch, f"launch_{launcher}")(*moved, **options)
    return tree_map_only(Tensor, Tensor.cpu, (returned, moved))


def compute(device, kernel, x_BTd, g_BTp, *, views=("as it is", "as it is"), **patched):
    """Square norms by a kernel; the views are taken in its process, since copies lose strides."""
    operands = (
        VIEWS[view](each.to(device)) for view, each in zip(views, (x_BTd, g_BTp), strict=True)
    )
    (squares, _config), _ = call(device, "squares", kernel, *operands, patched=patched)
    return squares[0] if kernel == "gram_squares" else squares


@pytest.fixture(scope="module")
def interpreter(interpreting):
    """Run functions in a process that interprets Triton."""
    triton = pytest.importorskip("triton", reason=MISSING)

    def run(function, *arguments, **named):
        return interpreting(function, "cpu", *arguments, **named)

    try:
        run(compute, "gram_squares", *draw(1, 1, 1, 1))
    except triton.runtime.errors.InterpreterError as error:
        if "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip("the interpreter of this Triton (3.6 and older) needs NumPy before 2.4")
    return run


@pytest.fixture
def gpu():
    pytest.importorskip("triton", reason=MISSING)
    return "cuda", lambda function, *arguments, **named: function("cuda", *arguments, **named)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """Where kernels run, and how to run a function there."""
    run = request.getfixturevalue(request.param)
    return run if request.param == "gpu" else ("interpreter", run)


def check(place, kernel: str, x_BTd: Tensor, g_BTp: Tensor, **named) -> None:
    name, run = place
    x_view, g_view = named.get("views", ("as it is", "as it is"))
    expected_B = squares(VIEWS[x_view](x_BTd), VIEWS[g_view](g_BTp))
    result_B = run(compute, kernel, x_BTd, g_BTp, **named)

    assert result_B.dtype == torch.float32
    tolerance = TOLERANCES[name][x_BTd.element_size()]
    torch.testing.assert_close(result_B.double(), expected_B.cpu(), rtol=tolerance, atol=0.0)


SIZES = [(3, 1, 1, 1), (3, 17, 40, 7), (1, 64, 32, 64), (1, 100, 33, 50)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "kernel"), one_in(2, SIZES, [torch.float32, torch.bfloat16], KERNELS)
)
def test_norms_are_those_of_the_gradients(place, sizes, dtype, kernel) -> None:
    check(place, kernel, *draw(*sizes, dtype))


@pytest.mark.parametrize("programs", [1, FEW])
@pytest.mark.parametrize("kernel", KERNELS)
def test_few_programs_go_through_all_tiles(place, kernel, programs) -> None:
    check(place, kernel, *draw(2, 70, 33, 40), PROGRAMS=programs)


@pytest.mark.parametrize(
    ("views", "kernel"), one_in(2, list(pairwise([*VIEWS, "as it is"])), KERNELS)
)
def test_any_strides_will_do(place, views, kernel) -> None:
    check(place, kernel, *draw(2, 33, 17, 33), views=views)


def tell_described(_device, x_BTd, g_BTp, view="as it is"):
    from dpprof.private.norms import triton_launch  # noqa: PLC0415

    return triton_launch._is_described(VIEWS[view](x_BTd), g_BTp)


DESCRIBED = {"as it is": True, "slice of a wider tensor": False, "tokens first": False}
DESCRIBED |= {"one sample for all": False, "one token for all": False}


@pytest.mark.parametrize("view", DESCRIBED)
def test_matrices_of_all_samples_are_described(interpreter, view) -> None:
    """Their last blocks have tokens of the next sample, and columns that are not there."""
    x_BTd, g_BTp = draw(3, 70, 40, 72, torch.bfloat16)
    views = view, "as it is"

    assert interpreter(tell_described, x_BTd, g_BTp, view) == DESCRIBED[view]
    check(("interpreter", interpreter), "gram_squares", x_BTd, g_BTp, views=views)
    g_BTp[1] = torch.nan
    found_B = interpreter(compute, "gram_squares", x_BTd, g_BTp, views=views)
    assert found_B.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((2, 70, 40, 72), torch.float32),
        ((2, 63, 40, 72), torch.bfloat16),
        ((2, 70, 40, 73), torch.bfloat16),
    ],
)
def test_other_operands_are_read_by_pointers(interpreter, sizes, dtype) -> None:
    assert not interpreter(tell_described, *draw(*sizes, dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_samples_do_not_change_each_others_norms(place, kernel) -> None:
    """One of zeros, one that is not finite; and a batch without samples has no norms."""
    x_BTd, g_BTp = draw(4, 20, 18, 40)
    g_BTp[1] = 0
    check(place, kernel, x_BTd, g_BTp)
    x_BTd[2, 3, 2] = torch.nan
    found = place[1](compute, kernel, x_BTd, g_BTp)
    assert found.isnan().tolist() == [False, False, True, False]
    assert torch.equal(found[:2], place[1](compute, kernel, x_BTd, g_BTp)[:2])  # to the last bit
    assert place[1](compute, kernel, *draw(0, 4, 5, 6)).shape == (0,)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_that_cancel_leave_nothing(place, kernel) -> None:
    x_BTd, g_BTp = (half.repeat(1, 2, 1) for half in draw(2, 20, 30, 40))
    g_BTp[:, 20:] *= -1
    result_B = place[1](compute, kernel, x_BTd, g_BTp)
    scale_B = ((x_BTd.norm(dim=2) * g_BTp.norm(dim=2)).sum(dim=1)) ** 2

    assert (result_B <= 1e-6 * scale_B).all()
    if kernel == "product_squares":
        assert (result_B >= 0).all()
    else:  # a difference of large squares: wrong by no more than is said
        x_BTT, g_BTT = x_BTd @ x_BTd.mT, g_BTp @ g_BTp.mT
        slack_B = gram_slack(
            trace_of_x_B=x_BTT.diagonal(dim1=1, dim2=2).sum(dim=1),
            trace_of_g_B=g_BTT.diagonal(dim1=1, dim2=2).sum(dim=1),
            square_of_x_B=x_BTT.square().sum(dim=(1, 2)),
            square_of_g_B=g_BTT.square().sum(dim=(1, 2)),
            d=30,
            p=40,
            depth=0,
        )
        assert (result_B + slack_B >= 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("scale", "dtype"), [(1e3, torch.float16), (1e7, torch.bfloat16)])
def test_sums_that_16_bits_could_not_hold_are_norms(place, scale, dtype, kernel) -> None:
    check(place, kernel, *((scale * part).to(dtype) for part in draw(2, 40, 33, 33)))


@pytest.mark.parametrize(("d", "p"), [(18, 40), (129, 300)])  # less than a slice, and more
def test_traces_and_squares_of_both_gram_matrices_come_with_them(interpreter, d, p) -> None:
    x_BTd, g_BTp = draw(3, 70, d, p)
    (sums_5B, _config), _ = interpreter(call, "squares", "gram_squares", x_BTd, g_BTp)
    x_BTd, g_BTp = x_BTd.double(), g_BTp.double()

    expected = [each.square().sum((1, 2)) for each in (x_BTd, g_BTp)]
    expected += [(each @ each.mT).square().sum((1, 2)) for each in (x_BTd, g_BTp)]
    torch.testing.assert_close(sums_5B[1:].double(), torch.stack(expected), rtol=1e-5, atol=0)


def tell(_device, x_BTd, g_BTp):
    """Run the operator that stands for a kernel, and ask what was recorded of it."""
    from dpprof.private.norms import triton_ops  # noqa: PLC0415

    triton_ops.gram_squares(x_BTd, g_BTp)
    return triton_ops.chosen_tiles("tiled gram", 20, 18, 40), triton_ops.chosen_tiles(
        "tiled product", 20, 18, 40
    )


def test_the_tiles_with_which_a_kernel_ran_are_recorded(interpreter) -> None:
    ran, never = interpreter(tell, *draw(3, 20, 18, 40))

    assert ran == {"TILE_T": 32, "TILE_K": 32, "num_warps": 1, "num_stages": 1}
    assert never is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_does_not_fit_is_refused(place, kernel) -> None:
    run = partial(place[1], compute)
    with pytest.raises(TypeError, match=r"float64 and torch\.float64"):
        run(kernel, *draw(2, 3, 4, 5, torch.float64))
    with pytest.raises(TypeError, match=r"bfloat16 and torch\.float32"):
        run(kernel, torch.ones(2, 3, 4).bfloat16(), torch.ones(2, 3, 5))
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) and \(2, 4, 5\)"):
        run(kernel, torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(2, 5\)"):
        run(kernel, torch.ones(2, 4), torch.ones(2, 5))


@pytest.mark.parametrize(
    ("sizes", "is_centred", "dtype", "programs"),
    one_in(
        2,
        [(1, 1, 1), (3, 21, 37), (2, 64, 16)],
        [True, False],
        [torch.float32, torch.bfloat16],
        [1, 64],
    ),
)
def test_gradients_of_a_scale(place, sizes, is_centred, dtype, programs) -> None:
    B, T, d = sizes
    x_BTd, g_BTd = draw(B, T, d, d, dtype)
    mean_BT, rstd_BT = x_BTd.float().mean(2), 1 + x_BTd.float().square().mean(2)
    normal_BTd = x_BTd.double() - (mean_BT.double()[:, :, None] if is_centred else 0)
    expected_Bd = (g_BTd.double() * normal_BTd * rstd_BT.double()[:, :, None]).sum(1)

    views = x_BTd.mT.contiguous().mT, g_BTd.repeat_interleave(2, dim=2)[..., ::2]
    mean_BT = mean_BT if is_centred else None
    operands = (call, "scale_gradients", *views, mean_BT, rstd_BT)
    both_BRd, alone_BRd = (
        place[1](*operands, shifted=shifted, patched={"PROGRAMS": programs})[0]
        for shifted in (True, False)
    )

    assert both_BRd.dtype == torch.float32
    torch.testing.assert_close(alone_BRd, both_BRd[:, :1], rtol=1e-5, atol=1e-5)
    expected_BRd = torch.stack([expected_Bd, g_BTd.double().sum(1)], dim=1)
    torch.testing.assert_close(both_BRd.double(), expected_BRd, rtol=1e-5, atol=1e-5)


def weigh(device, x_BTd, weights_B, count):
    from dpprof.private.norms import triton_launch  # noqa: PLC0415

    x_BTd = x_BTd.to(device)
    x_BTd = x_BTd[:1].expand(count, *x_BTd.shape[1:]) if len(x_BTd) == 1 else x_BTd[:count]
    return triton_launch.launch_weigh(x_BTd, weights_B.to(device)).cpu()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    one_in(
        2,
        [(3, 7, 11), (2, 16, 32), (1, 3, 5), (4, 1, 1)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_samples_times_their_weights_are_rounded_once(place, sizes, dtype) -> None:
    x_BTd = draw(*sizes, 1, dtype)[0]
    weights_B = torch.rand(5) / 3
    count = 5 if len(x_BTd) == 1 else len(x_BTd)
    found = place[1](weigh, x_BTd, weights_B[:count], count)

    expected = (x_BTd.float() * weights_B[:count, None, None]).to(dtype)
    assert found.is_contiguous()
    # Triton's interpreter cuts bfloat16 off.
    rtol = 2**-7 if place[0] == "interpreter" and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


PLAIN = {"ignored": -100, "smoothing": 0.0, "scale": 1.0, "cap": None}
FEW_LOGITS = {"LOGITS": {"BLOCK": 16}}
LOSSES = {
    "plain": {},
    "capped": {"cap": 2.0},
    "all": {"cap": 3.0, "scale": 0.5, "smoothing": 0.2, "ignored": 4},
}


@pytest.mark.parametrize(
    ("V", "changed", "is_weighted", "dtype"),
    one_in(3, [1, 16, 37], LOSSES, [False, True], [torch.float32, torch.bfloat16]),
)
def test_losses_and_gradients_of_logits(place, V, changed, is_weighted, dtype) -> None:
    options = PLAIN | LOSSES[changed]
    random = torch.Generator().manual_seed(V)
    z_NV = (4 * torch.randn(5, V, generator=random)).to(dtype)
    labels_N = torch.tensor([0, V - 1, options["ignored"], min(3, V - 1), V // 2])
    incoming_N = torch.rand(5, generator=random) if is_weighted else None
    exact_NV = z_NV.double().requires_grad_()
    scaled_NV = options["scale"] * exact_NV
    if options["cap"]:
        scaled_NV = options["cap"] * torch.tanh(scaled_NV / options["cap"])
    counted_N = labels_N != options["ignored"]
    expected_N = torch.nn.functional.cross_entropy(
        scaled_NV,
        labels_N.where(counted_N, torch.tensor(0)),
        reduction="none",
        label_smoothing=options["smoothing"],
    ).where(counted_N, torch.tensor(0.0).double())
    expected_N.backward(torch.ones(5) if incoming_N is None else incoming_N)

    operands = (call, "cross_entropy", z_NV, labels_N, incoming_N)
    losses_N, (g_NV, *_) = place[1](*operands, patched=FEW_LOGITS, **options)

    torch.testing.assert_close(losses_N.double(), expected_N.detach(), rtol=1e-5, atol=1e-5)
    limits = (
        {"rtol": 2**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    )
    torch.testing.assert_close(g_NV.double(), exact_NV.grad, **limits)


def test_wrong_labels_and_logits_give_losses_that_are_not_numbers(place) -> None:
    z_NV = torch.zeros(5, 20)
    z_NV[2, 3], z_NV[3, 3] = torch.nan, torch.inf
    labels_N = torch.tensor([20, -1, 0, 0, 0])
    operands = (call, "cross_entropy", z_NV, labels_N, None)
    losses_N, _ = place[1](*operands, patched=FEW_LOGITS, **PLAIN)

    assert losses_N.isnan().tolist() == [True, True, True, True, False]


def philox(counters: Tensor, key: int, rounds: int = 10) -> Tensor:
    """Compute Philox4x32 of counters, (N, 4), as its authors define it."""
    words = [list(map(int, word)) for word in counters.T]
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        a, b, c, d = words
        products = [0xD2511F53 * one for one in a], [0xCD9E8D57 * one for one in c]
        words = [
            [(p >> 32) ^ one ^ low for p, one in zip(products[1], b, strict=True)],
            [p & 0xFFFFFFFF for p in products[1]],
            [(p >> 32) ^ one ^ high for p, one in zip(products[0], d, strict=True)],
            [p & 0xFFFFFFFF for p in products[0]],
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return torch.tensor(words, dtype=torch.float64).T


def test_the_reference_is_the_authors() -> None:
    """Known answers of Random123, the library of Salmon et al."""
    zeros, ones = torch.zeros(1, 4), torch.full((1, 4), 2**32 - 1, dtype=torch.float64)

    assert [f"{int(one):08x}" for one in philox(zeros, 0)[0]] == [
        *("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")
    ]
    assert [f"{int(one):08x}" for one in philox(ones, 2**64 - 1)[0]] == [
        *("408f276d", "41c83b0e", "a20bc7c6", "6d5451fd")
    ]


def add_noise(device, summed, words, which, *, std=1.0, factor=1.0, **patched):
    operands = (summed.clone(), torch.tensor(words), which, std, factor)
    return call(device, "noise", *operands, patched=patched)[1][0]


FAR = (130,)
"""A sum whose key and number were searched for: its first two numbers are 1 of 10^9."""


@pytest.mark.parametrize(
    ("sizes", "words", "which"),
    [
        ((7, 30), [5, -(2**62) + 77], 0),
        ((64,), [2**62 + 12345, 2**40 + 9], 3),
        ((1,), [2**63 - 1, -1], 2**31 - 1),
        (FAR, [7, 0], 566_275_388),
    ],
)
def test_noise_is_that_of_its_key_its_number_and_its_place(place, sizes, words, which) -> None:
    group = 16
    summed = torch.rand(sizes)
    noised = place[1](add_noise, summed, words, which, std=0.5, factor=0.125, GROUP=group)

    n = summed.numel()
    programs = -(-n // (4 * group))
    places = torch.arange(programs * group, dtype=torch.float64)
    key, digest = words
    others = (digest % 2**32, which, (digest >> 32) % 2**32)
    counters = torch.stack([places, *(0 * places + one for one in others)], dim=1)
    a, b, c, d = philox(counters, key).T / 2**32
    pairs = [(a, b), (c, d)]
    tau, least = 2 * torch.pi, 2**-33
    normals = [
        (-2 * (of + least).log()).sqrt() * turn(tau * angle)
        for of, angle in pairs
        for turn in (torch.cos, torch.sin)
    ]
    if sizes == FAR:
        assert float(torch.hypot(*(one[0] for one in normals[:2]))) > 6.4
    noise = torch.stack(normals).view(4, programs, group).transpose(0, 1).flatten()[:n]
    expected = summed.double() * 0.125 + 0.5 * noise.view(sizes)
    torch.testing.assert_close(noised.double(), expected, rtol=1e-5, atol=3e-6)


def test_without_elements_there_are_no_results(place) -> None:
    run, x_BTd = place[1], torch.ones(0, 4, 6)
    of_scale, _ = run(call, "scale_gradients", x_BTd, x_BTd, None, x_BTd[:, :, 0], shifted=True)

    assert of_scale.shape == (0, 2, 6)
    assert run(weigh, torch.ones(2, 3, 4), torch.ones(0), 0).shape == (0, 3, 4)
    assert run(add_noise, torch.ones(0, 3), [1, 0], 0).shape == (0, 3)


def tell_moments(device, n):
    """Draw noise of two keys and two numbers, and measure it."""
    draws = [
        add_noise(device, torch.zeros(n), [key, 0], which, std=2.0, GROUP=1024).double() / 2
        for key, which in ((1, 0), (2, 0), (1, 1))
    ]
    first = draws[0]
    moments = [float(first.pow(power).mean()) for power in (1, 2, 3, 4)]
    tails = [float((first.abs() > sigmas).double().mean()) for sigmas in (1, 2, 3, 4)]
    products = [float((first * other).mean()) for other in draws[1:]]
    products += [float((first[:-lag] * first[lag:]).mean()) for lag in (1, 16, 1024)]
    return moments, tails, products


def test_noise_is_normal_and_independent(place) -> None:
    n = 2**16 if place[0] == "interpreter" else 2**24
    moments, tails, products = place[1](tell_moments, n)

    normal = torch.distributions.Normal(0.0, 1.0)
    for found, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert found == pytest.approx(expected, abs=5 * (variance / n) ** 0.5)
    for sigmas, found in enumerate(tails, start=1):
        share = 2 * float(normal.cdf(torch.tensor(-sigmas, dtype=torch.float64)))
        assert found == pytest.approx(share, abs=5 * (share / n) ** 0.5)
    for found in products:
        assert found == pytest.approx(0, abs=5 / n**0.5)


def tell_deviations(device, dtype, n):
    """Add the noise of a step to a sum of zeros, and measure it in each part of its numbers."""
    from dpprof.private.noise import noise  # noqa: PLC0415
    from dpprof.private.noise.noise_keys import StepKey  # noqa: PLC0415
    from dpprof.private.norms import placement, tuning  # noqa: PLC0415

    summed = torch.zeros(n, dtype=dtype, device=device)
    step = noise.NoiseOfStep(0.5, 2.0, StepKey(bytes(32)))
    with (
        placement.as_if_on_cuda(),
        mock.patch.object(tuning, "GROUP", 2**14),  # few programs to interpret
        mock.patch.object(noise, "draw_noise") as by_pytorch,
    ):
        step.add_to(summed)
    assert not by_pytorch.called
    parts = [summed.real, summed.imag] if dtype.is_complex else [summed]
    return [float(one.cpu().double().std()) for one in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_each_part_of_a_number_gets_noise_of_the_whole_scale(place, dtype) -> None:
    for found in place[1](tell_deviations, dtype, 10**6):
        assert found == pytest.approx(0.5, rel=0.01)


def test_without_the_interpreter_tensors_of_a_cpu_are_refused() -> None:
    pytest.importorskip("triton", reason=MISSING)
    with pytest.raises(ValueError, match="must be on one CUDA device, not on cpu and cpu"):
        compute("cpu", "gram_squares", *draw(1, 2, 3, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes", [(2, 4_096, 1_024, 1_024), (3, 1_000, 768, 3_001), (64, 128, 512, 2_048)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_norms_are_those_of_the_gradients_of_large_layers(gpu, kernel, sizes, dtype) -> None:
    check(gpu, kernel, *draw(*sizes, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_norms_are_no_lower_where_torch_may_use_tf32(gpu, kernel, precision) -> None:
    """TF32 itself, rounded or cut off, would see 1."""
    seen = 1 + 2**-12
    B, T, d, p = 2, 256, 512, 256
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        result_B = gpu[1](compute, kernel, torch.full((B, T, d), 1 + 2**-12), torch.ones(B, T, p))
    finally:
        torch.set_float32_matmul_precision(usual)

    assert result_B.tolist() == pytest.approx([d * p * (T * seen) ** 2] * B, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_beyond_32_bits_are_reached(gpu, kernel) -> None:
    B, T, stride, d, p = 2, 80, 2**25, 32, 16
    x_BTd = torch.zeros(B, T, stride, dtype=torch.bfloat16, device="cuda")[..., -d:]
    x_BTd.copy_(torch.randn(B, T, d))
    g_BTp = torch.randn(B, T, p).bfloat16()
    assert T * stride > 2**31

    check(gpu, kernel, x_BTd, g_BTp.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_is_that_of_the_partial_sums_even_when_tuning(gpu, kernel) -> None:
    x_BTd, g_BTp = (a_BTK.cuda() for a_BTK in draw(4, 2_048, 512, 512))
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    gpu[1](compute, kernel, x_BTd, g_BTp)

    assert torch.cuda.max_memory_allocated() - before_bytes < 2**16  # a T x T has 2^24


def digest(device, sums, table):
    return call(device, "digest", torch.tensor([3, 5]), sums, table)[1][0].tolist()


def test_a_digest_is_a_hash_of_hashes_modulo_2_to_the_64(place) -> None:
    draw = torch.Generator().manual_seed(2)
    sums = [torch.empty(n, dtype=torch.int32).random_(generator=draw) - 2**30 for n in (40, 16, 0)]
    table = torch.empty(5000, dtype=torch.int64).random_(generator=draw) * 2 - 2**40
    found = [place[1](digest, sums, table) for _ in range(2)]

    assert found[0] == found[1]
    assert found[0][0] == 3
    if place[0] == "interpreter":  # whose groups are of 16
        expected = 0
        for which, words in enumerate(sums):
            for at, group in enumerate(words.split(16)):
                pairs = zip(group.tolist(), table[1 : len(group) + 1].tolist(), strict=True)
                hashed = sum(a * b for a, b in pairs) % 2**64
                counter = torch.tensor([[at, which, 0, 0]]).double()
                a, b, c, d = philox(counter, int(table[0]) % 2**64)[0]
                keys = int(a) + (int(b) << 32), int(c) + (int(d) << 32)
                expected += hashed % 2**32 * keys[0] + (hashed >> 32) * keys[1]
        assert (found[0][1] - expected) % 2**64 == 0
    for words in sums[:2]:
        for change in (1, -(2**31)):
            words[3] ^= change
            assert place[1](digest, sums, table)[1] != found[0][1]
            words[3] ^= change
