"""The devices that an estimate can be for; they need not be present.

Memory is the device's total that PyTorch reports in public logs (the least where drivers differ),
minus the memory of a CUDA context and its libraries. Compute and bandwidth are the data sheets'
dense figures, because training does not use the sparse ones, which are twice as high. A test
computes the peaks again from processors and clocks; a sparse figure fails it.
"""

from dpprof.spec.target import Dtype, Target

_CONTEXT = 600 * 2**20
"""Memory of a CUDA context with cuBLAS and cuDNN loaded: reports give 300 to 450 MiB for the bare
context (pytorch#109888, unsloth-zoo#1053), and the libraries' kernels add to that."""


def _gpu(  # noqa: PLR0917 (a row of a table)
    total_bytes: float,
    gb_per_s: float,
    at: str,
    tflops: tuple[float, float, float, float],
    cc: str,
    multiprocessors: int,
) -> Target:
    dtypes: tuple[Dtype, ...] = ("float64", "float32", "tf32", "bfloat16")
    return Target(
        memory_bytes=int(total_bytes) - _CONTEXT,
        flops_per_s={name: value * 1e12 for name, value in zip(dtypes, tflops, strict=True)},
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        compute_capability=cc,
        multiprocessors=multiprocessors,
        source=f"NVIDIA {at}, without sparsity",
    )


_H100_SXM = ((67, 67, 494.7, 989.4), "9.0", 132)
_A100 = ((19.5, 19.5, 156, 312), "8.0", 108)

H200 = _gpu(150_109_945_856, 4800, "H200 Tensor Core GPU data sheet, SXM", *_H100_SXM)
H100 = _gpu(85_017_493_504, 3350, "H100 Tensor Core GPU data sheet, SXM5 80 GB", *_H100_SXM)
H100_PCIE = _gpu(
    81_008 * 2**20,
    2000,
    "H100 Tensor Core GPU architecture white paper, PCIe 80 GB",
    (51, 51, 378, 756),
    "9.0",
    114,
)
H100_NVL = _gpu(
    93.00 * 2**30,
    3900,
    "H100 Tensor Core GPU data sheet, NVL 94 GB",
    (60, 60, 417.5, 835),
    "9.0",
    132,
)
A100 = _gpu(85_093_711_872, 2039, "A100 Tensor Core GPU data sheet, SXM4 80 GB", *_A100)
A100_PCIE = _gpu(81_049 * 2**20, 1935, "A100 Tensor Core GPU data sheet, PCIe 80 GB", *_A100)
A100_40GB = _gpu(42_298_834_944, 1555, "A100 Tensor Core GPU data sheet, SXM4 40 GB", *_A100)
B200 = _gpu(
    182_631 * 2**20, 7700, "Blackwell data sheet, HGX B200", (37, 75, 1100, 2250), "10.0", 148
)
L40S = _gpu(47_803_531_264, 864, "L40S data sheet", (1.43, 91.6, 183, 362), "8.9", 142)
L4 = _gpu(23_622_320_128, 300, "L4 Tensor Core GPU data sheet", (0.47, 30.3, 60, 121), "8.9", 58)
RTX_4090 = _gpu(
    25_756_172_288,
    1008,
    "Ada GPU architecture white paper, appendix on the RTX 4090",
    (1.29, 82.6, 82.6, 165.2),
    "8.9",
    128,
)

CPU = None
"""This machine: it needs no model of libraries and has no data sheet."""

_BY_DEVICE_NAME = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100 80GB PCIe": A100_PCIE,
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA B200": B200,
    "NVIDIA L40S": L40S,
    "NVIDIA L4": L4,
    "NVIDIA GeForce RTX 4090": RTX_4090,
}


def find_by_device_name(name: str | None) -> Target | None:
    """Return the target of a driver's name for a GPU; None for unknown variants."""
    return _BY_DEVICE_NAME.get(name or "")
