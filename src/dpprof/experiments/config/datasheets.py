"""The devices that an estimate can be for; they need not be present.

Memory is the device's total that PyTorch reports in public logs (the least where drivers differ),
minus the memory of a CUDA context and its libraries. Compute and bandwidth are the data sheets'
dense figures, because training does not use the sparse ones, which are twice as high. GeForce cards
add up products of 16 bits in float32 at half the speed of adding them up in 16 bits; PyTorch adds
up in float32. A test computes the peaks again from processors and clocks; a sparse figure fails it.

Volta and Turing have neither TF32 nor bfloat16: their products run as float32's, which is an upper
bound for bfloat16.

Where totals are in issues: T4 Zheng-Chong/CatVTON 133; V100 kchengiva/Shift-GCN 34 (16 GB) and
liucongg/ChatGLM-Finetuning 73 (32 GB); RTX 3060 Kunhao-Liu/StyleGaussian 12; RTX 3090
vllm-project/vllm 16343; RTX 5090 TrajectoryCrafter/TrajectoryCrafter 20; RTX PRO 6000 antirez/ds4
431. An A5000 has as much memory as an RTX 3090 (24,564 MiB by nvidia-smi, 24,576 by older drivers).
A10G and A6000: logs in public repositories, 22.06 and 47.40 GiB.
"""

from dpprof.experiments.config.target import Dtype, Target

_CONTEXT = 600 * 2**20
"""Memory of a CUDA context with cuBLAS and cuDNN loaded: reports give 300 to 450 MiB for the bare
context (pytorch#109888, unsloth-zoo#1053), and the libraries' kernels add to that."""

_CONTEXT_OF_T4 = 141 * 2**20
"""Memory of a CUDA context that was measured in training (fitcheck-llm 0.3.1)."""


def _gpu(  # noqa: PLR0917 (a row of a table)
    total_bytes: float,
    gb_per_s: float,
    sheet: str,
    tflops: tuple[float, ...],
    cc: str,
    multiprocessors: int,
    context: int = _CONTEXT,
) -> Target:
    dtypes: tuple[Dtype, ...] = ("float64", "float32", "tf32", "bfloat16", "float16")
    return Target(
        memory_bytes=int(total_bytes) - context,
        flops_per_s={name: value * 1e12 for name, value in zip(dtypes, tflops, strict=False)},
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        compute_capability=cc,
        multiprocessors=multiprocessors,
        source=f"NVIDIA {sheet}, without sparsity",
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
A10G = _gpu(22.06 * 2**30, 600, "A10G data sheet", (0.55, 35, 35, 70), "8.6", 80)
A5000 = _gpu(23.68 * 2**30, 768, "RTX A5000 data sheet", (0.43, 27.8, 55.6, 111.1), "8.6", 64)
A6000 = _gpu(47.40 * 2**30, 768, "RTX A6000 data sheet", (0.6, 38.7, 77.4, 154.8), "8.6", 84)
RTX_3060 = _gpu(
    11.75 * 2**30, 360, "GeForce RTX 3060 12 GB specifications", (0.2, 12.7, 12.7, 25.5), "8.6", 28
)
RTX_3090 = _gpu(
    23.68 * 2**30,
    936,
    "Ampere GA102 GPU architecture white paper, table of the RTX 3090",
    (0.56, 35.6, 35.6, 71),
    "8.6",
    82,
)
RTX_5090 = _gpu(
    31.36 * 2**30,
    1792,
    "RTX Blackwell GPU architecture white paper, appendix on the RTX 5090",
    (1.64, 104.8, 104.8, 209.5),
    "12.0",
    170,
)
RTX_PRO_6000 = _gpu(
    94.97 * 2**30,
    1792,
    "RTX PRO 6000 Blackwell Workstation Edition data sheet",
    (1.97, 126, 251.9, 503.8),
    "12.0",
    188,
)
T4 = _gpu(
    14_912 * 2**20, 320, "T4 data sheet", (0.25, 8.1, 8.1, 8.1, 65), "7.5", 40, _CONTEXT_OF_T4
)
_V100 = (900, "V100 data sheet, SXM2", (7.8, 15.7, 15.7, 15.7, 125), "7.0", 80)
V100 = _gpu(15.78 * 2**30, *_V100)
V100_32GB = _gpu(31.74 * 2**30, *_V100)

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
    "NVIDIA A10G": A10G,
    "NVIDIA RTX A5000": A5000,
    "NVIDIA RTX A6000": A6000,
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA GeForce RTX 5090": RTX_5090,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": RTX_PRO_6000,
    "Tesla T4": T4,
    "Tesla V100-SXM2-16GB": V100,
    "Tesla V100-SXM2-32GB": V100_32GB,
}
"""Without the RTX 3060, whose boards of 8 and of 12 GB have one name."""


def find_by_device_name(name: str | None) -> Target | None:
    """Return the target of a driver's name for a GPU; None for unknown variants."""
    return _BY_DEVICE_NAME.get(name or "")
