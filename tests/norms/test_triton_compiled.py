"""Kernels compile ahead of time for GPUs that are not there, and fit them."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from dpprof.private.norms.float32_products import name_precision

triton = pytest.importorskip("triton", reason="the extra dpprof[triton] is not installed")

# Shared memory of a block, from the CUDA C++ Programming Guide, table "Technical Specifications
# per Compute Capability".
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHITECTURES = [90, *(pytest.param(one, marks=pytest.mark.slow) for one in (80, 100))]
STACK_BYTES = 16
"""What compilers set aside without spilling: they keep a barrier there, and align."""


@pytest.fixture(autouse=True)
def compiled_here(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def find_program(kernel: str):
    from dpprof.private.norms import triton_kernels  # noqa: PLC0415 (it imports triton)

    return getattr(triton_kernels, f"sum_{kernel}_squares")


def list_configs(kernel: str, dtype: torch.dtype) -> list:
    from dpprof.private.norms.tuning import keep_suitable  # noqa: PLC0415 (it imports triton)

    arguments = {"x_ptr": torch.empty(0, dtype=dtype)}
    return keep_suitable(find_program(kernel).configs, arguments, PRECISION=name_precision(dtype))


def build(kernel: str, config, dtype: torch.dtype, capability: int):
    """Compile for sizes and strides in multiples of 16, and features side by side."""
    constants = {"PRECISION": name_precision(dtype), "EVEN": True, "x_k": 1, "g_k": 1}
    constants |= {"DESCRIBED": False} if kernel == "gram" else {}
    constants |= config.kwargs
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_for(find_program(kernel).fn.fn, constants, dtype, capability, options)


def compile_for(
    function, constants: dict, dtype: torch.dtype, capability: int, options: dict, **types: str
):
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    pointers = dict.fromkeys(("partial_ptr", "mean_ptr", "rstd_ptr"), "*fp32")
    pointers |= {"loss_ptr": "*fp32", "incoming_ptr": "*fp32", "label_ptr": "*i64"}
    pointers |= dict.fromkeys(("x_ptr", "g_ptr", "z_ptr"), POINTERS[dtype])
    pointers |= dict.fromkeys(("smoothing", "scale", "cap"), "fp32")
    pointers |= types
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in function.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if name not in constants and name not in types
    }
    return triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def stack_bytes(compiled) -> int:
    """Tell what of a thread's registers went to memory, by what the machine code sets aside."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])


PRODUCTS = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma")


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gram", "product"])
def test_tf32_products_are_of_rounded_operands_alone(tf32, kernel, capability) -> None:
    config = min(list_configs(kernel, torch.float32), key=lambda one: sorted(one.kwargs.values()))
    compiled = build(kernel, config, torch.float32, capability)
    ptx = compiled.asm["ptx"]

    assert PRODUCTS.search(ptx)
    assert "tf32" in ptx
    # Products of three pairs, each of operands that were rounded and not cut off.
    assert len(PRODUCTS.findall(ptx)) % 3 == 0
    assert "cvt.rna.tf32.f32" in ptx
    assert compiled.metadata.shared <= SHARED_BYTES[89]
    assert stack_bytes(compiled) <= STACK_BYTES


def test_described_operands_are_copied_by_the_gpus_engine() -> None:
    from dpprof.private.norms import tuning  # noqa: PLC0415 (it imports triton)

    config = tuning.DESCRIBED
    constants = {"PRECISION": "ieee", "EVEN": True, "DESCRIBED": True, **config.kwargs}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    block = f"tensordesc<bf16[{config.kwargs['TILE_T']}, {config.kwargs['TILE_K']}]>"
    function = find_program("gram").fn.fn
    types = {"x_ptr": block, "g_ptr": block}
    compiled = compile_for(function, constants, torch.bfloat16, 90, options, **types)

    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert PRODUCTS.search(compiled.asm["ptx"])
    assert compiled.metadata.shared <= SHARED_BYTES[90]
    assert stack_bytes(compiled) <= STACK_BYTES


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("dtype", POINTERS)
@pytest.mark.parametrize("kernel", ["sum_scaled", "differentiate_cross_entropy"])
def test_kernels_of_few_passes_spill_nothing_and_load_whole_vectors(
    kernel, dtype, capability
) -> None:
    from dpprof.private.norms import triton_passes, tuning  # noqa: PLC0415 (they import triton)

    constants = {
        "sum_scaled": {"x_k": 1, "g_k": 1, "CENTRED": True, "SHIFTED": True, **tuning.SCALED},
        "differentiate_cross_entropy": {"CAPPED": True, "WEIGHTED": True, **tuning.LOGITS},
    }[kernel]
    function = getattr(triton_passes, kernel)
    compiled = compile_for(function, constants, dtype, capability, {"num_warps": 8})

    assert stack_bytes(compiled) <= STACK_BYTES
    assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", compiled.asm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("numbers", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["gram", "product"])
def test_tuning_has_choices_that_fit_and_spill_nothing(
    kernel, numbers, capability, request
) -> None:
    """Of what does not fit, or spills, tuning sees the error or the time."""
    if numbers == "tf32":
        request.getfixturevalue("tf32")
    dtype = torch.bfloat16 if numbers == "bfloat16" else torch.float32
    compiled = [build(kernel, config, dtype, capability) for config in list_configs(kernel, dtype)]
    fits = [one for one in compiled if one.metadata.shared <= SHARED_BYTES[capability]]

    assert fits == compiled or capability == 89
    assert sum(stack_bytes(one) <= STACK_BYTES for one in fits) >= 2
