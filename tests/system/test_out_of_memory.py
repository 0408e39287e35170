import pytest

from dpprof.system.messages import is_out_of_memory, requested_bytes

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 16384000 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.20 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError(CPU), True),
        (RuntimeError(CUDA), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (
            RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm`"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("out of memory is only a word here"), False),
        (KeyError("memory"), False),
    ],
)
def test_memory_exhaustion_is_told_from_other_failures(error, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("message", "limited", "expected"),
    [
        ("could not create a primitive", True, True),
        ("could not create a primitive", False, False),
        ("could not create a primitive descriptor for a matmul", True, False),
    ],
)
def test_onednn_runs_out_of_memory_only_where_it_is_limited(message, limited, expected) -> None:
    assert is_out_of_memory(RuntimeError(message), limited=limited) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [(CPU, 16_384_000), (CUDA, 2_684_354_560), ("something else", None)],
)
def test_the_size_of_the_failed_allocation_is_read(message: str, expected: int | None) -> None:
    assert requested_bytes(message) == expected
