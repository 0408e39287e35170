import pytest
import torch
from factory import make_experiment

from dpprof.models.build import apply_dtype, build_model

CASES = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
}


@pytest.mark.parametrize("dtype", CASES)
def test_parameters_products_and_logits_have_the_dtypes_promised(dtype) -> None:
    experiment = make_experiment(dtype=dtype)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu"))
    products = []
    model.head.register_forward_hook(lambda _, __, output: products.append(output.dtype))
    logits = model(torch.zeros(2, 4, dtype=torch.int64))

    assert (next(model.parameters()).dtype, products[0], logits.dtype) == CASES[dtype]
    logits.sum().backward()
    assert model.head.weight.grad.dtype == CASES[dtype][0]
