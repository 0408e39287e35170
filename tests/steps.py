"""A method's gradient, and samples' gradients from nothing of dpprof's methods."""

import torch
from factory import make_experiment
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpprof.experiments.config import registry
from dpprof.subjects.methods.training_step import Batch, TrainingStep
from dpprof.subjects.models.build import apply_dtype, build_model


def prepare(method: str, **fields) -> tuple[TrainingStep, Batch]:
    experiment = make_experiment(method=method, **fields)
    torch.manual_seed(0)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu"))
    # Away from its start, where some gradients are too regular to tell methods apart.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    vocab_size = experiment.model.vocab_size
    tokens = torch.randint(vocab_size, (experiment.batch_size, experiment.seq_len + 1))
    step = registry.load("methods", method)(model, experiment)
    step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=1.0))
    return step, Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gradient(method: str, **fields) -> Tensor:
    step, batch = prepare(method, **fields)
    step.compute_gradient(batch, lambda _: None)
    return flat_gradient(step.module)


def flat_gradient(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def sample_gradients(**fields) -> list[Tensor]:
    """Each parameter's gradients of all samples, (B, elements), from torch.func."""
    step, batch = prepare("standard", **fields)
    parameters = {name: p.detach() for name, p in step.module.named_parameters()}

    def loss(parameters, tokens, labels):
        logits = torch.func.functional_call(step.module, parameters, (tokens[None],))
        return torch.nn.functional.cross_entropy(logits[0], labels)

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    with sdpa_kernel(SDPBackend.MATH):  # the kernel that vmap can follow
        gradients = per_sample(parameters, batch.x, batch.labels)
    return [g.flatten(1) for g in gradients.values()]


def norms_of(gradients: list[Tensor]) -> Tensor:
    """Norms of samples' gradients over all parameters, (B,)."""
    return torch.cat(gradients, dim=1).norm(dim=1)
