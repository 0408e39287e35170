import pytest

from dpprof.worker import is_out_of_memory, requested_bytes

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
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("out of memory is only a word here"), False),
        (KeyError("memory"), False),
    ],
)
def test_memory_exhaustion_is_told_from_other_failures(error, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [(CPU, 16_384_000), (CUDA, 2_684_354_560), ("something else", None)],
)
def test_the_size_of_the_failed_allocation_is_read(message: str, expected: int | None) -> None:
    assert requested_bytes(message) == expected
