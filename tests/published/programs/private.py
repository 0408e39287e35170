"""Private training as other libraries ran it, or by a method of dpprof.

Shape legend: B samples, T tokens or pixels, d inputs, p outputs of a layer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from opacus import GradSampleModule
from published.programs import image_models
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.subjects.methods.training_step import Batch

_SIGMA, _BOUND = 1.5, 10.0


class Task(NamedTuple):
    """A model, and what it is given."""

    model: nn.Module
    """Maps ``x`` to logits."""

    x: Tensor
    labels: Tensor

    def losses(self, reduction: str) -> Tensor:
        """Return the losses of samples, summed over their tokens, or the sum of all."""
        logits = self.model(self.x)
        if self.labels.dim() == 1:
            return functional.cross_entropy(logits, self.labels, reduction=reduction)
        losses_BT = functional.cross_entropy(logits.transpose(1, 2), self.labels, reduction="none")
        return losses_BT.sum() if reduction == "sum" else losses_BT.sum(dim=1)


class _Bert(nn.Module):
    """BERT that classifies sequences of ones, by the operators of eager attention."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = BertConfig(vocab_size=28_996, num_labels=3, attn_implementation="eager", **dropout)
        self.inner = BertForSequenceClassification(config)
        for table in ("position_embeddings", "token_type_embeddings"):
            getattr(self.inner.bert.embeddings, table).requires_grad_(False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        mask = torch.zeros(len(ids_BT), 1, 1, ids_BT.shape[1])
        types_BT = torch.zeros_like(ids_BT)
        logits: Tensor = self.inner(ids_BT, attention_mask=mask, token_type_ids=types_BT).logits
        return logits


_GPT2 = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20)}
"""Width, layers and heads."""


class _Gpt2(nn.Module):
    """GPT-2 with dropout, eager attention and a head of its own; predicts each next token."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

        D, layers, heads = _GPT2[name]
        config = GPT2Config(
            n_embd=D,
            n_layer=layers,
            n_head=heads,
            tie_word_embeddings=False,
            attn_implementation="eager",
            use_cache=False,
        )
        self.inner = GPT2LMHeadModel(config)

    def forward(self, ids_BT: Tensor) -> Tensor:
        places_BT = torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)
        logits_BTV: Tensor = self.inner(ids_BT, position_ids=places_BT).logits
        return logits_BTV[:, :-1].contiguous()


def _fix(channels: int) -> nn.Module:
    """Return what Opacus's ``ModuleValidator.fix`` replaces batch norm with."""
    return nn.GroupNorm(min(32, channels), channels)


def _build(name: str, size: int, B: int, *, is_private: bool) -> Task:
    kind, _, of = name.partition("/")
    labels = torch.empty(B, dtype=torch.int64)
    if kind in _GPT2:
        ids_BT = torch.zeros(B, size, dtype=torch.int64)
        return Task(_Gpt2(kind), ids_BT, torch.zeros(B, size - 1, dtype=torch.int64))
    if kind == "bert":
        return Task(_Bert(), torch.zeros(B, size, dtype=torch.int64), labels)
    vgg_without_norm = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 10))
    makers: dict[str, Callable[[], nn.Module]] = {
        "photos": lambda: image_models.ResNet(
            of, lambda channels: nn.GroupNorm(8, channels), 1000, for_photos=True
        ),
        "small": lambda: image_models.ResNet(of, _fix, 10, for_photos=False),
        "small-vgg": lambda: image_models.small_vgg(of, _fix, nn.Linear(512, 10)),
        "plain-vgg": lambda: image_models.small_vgg(of, lambda _: nn.Identity(), vgg_without_norm),
        "large-vgg": lambda: image_models.large_vgg(of, 1000),
        "cnn": image_models.tanh_cnn,
        "beit-large": lambda: image_models.Beit(size, 1024, 24, 16, 100, is_private=is_private),
    }
    x = torch.empty(B, 3, size, size)
    if kind == "photos":
        x = x.to(memory_format=torch.channels_last)
    return Task(makers[kind](), x, labels)


class _Hooked:
    """Calls a function in backward with each layer that has parameters, its input and gradient."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
        self.is_on = True
        self._call = call
        self._inputs: dict[nn.Module, Tensor] = {}
        self.layers = [
            layer
            for layer in model.modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False))
        ]
        for layer in self.layers:
            layer.register_forward_hook(self._keep)
            layer.register_backward_hook(self._run)

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
        if self.is_on:
            self._inputs[layer] = inputs[0].detach()

    def _run(self, layer: nn.Module, _: Any, gradients: tuple[Tensor, ...]) -> None:
        if self.is_on:
            self._call(layer, self._inputs.pop(layer), gradients[0].detach())


def _factors(norms: list[Tensor]) -> Tensor:
    norms_B = torch.stack(norms, dim=1).norm(2, dim=1)
    return (_BOUND / (norms_B + 1e-6)).clamp(max=1.0)


def _noise(like: Tensor) -> Tensor:
    return torch.normal(0.0, _SIGMA * _BOUND, like.shape)


class _Fork:
    """Two methods of opacus-fusion, a fork of Opacus 1.2.

    Parameters require no gradient while hooks are on, but for embeddings. Either per-sample
    gradients are kept until all are clipped. Or they give way to their norms, and forward and
    backward run again with each loss weighed. ``p.grad`` stays from step to step, filled with
    zeros.
    """

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer, *, keep: bool) -> None:
        self._task, self._optimizer, self._keeps = task, optimizer, keep
        self._trained = [p for p in task.model.parameters() if p.requires_grad]
        self._hooks = _Hooked(task.model, self._compute)
        self._one = torch.ones(1, requires_grad=True)
        self._samples: dict[Tensor, Tensor] = {}
        self._norms: list[Tensor] = []
        self._require_gradients(False)

    def _require_gradients(self, required: bool) -> None:
        for parameter in self._trained:
            parameter.requires_grad_(required)

    def _compute(self, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        own = {p: p.requires_grad for p in layer.parameters(recurse=False)}
        for p in own:
            p.requires_grad_(True)
        gradients = GradSampleModule.GRAD_SAMPLERS[type(layer)](layer, [x], gradient)
        for p, required in own.items():
            p.requires_grad_(required)
        for p, of_samples in gradients.items():
            if self._keeps:
                self._samples[p] = of_samples
            else:
                self._norms.append(of_samples.norm(2, dim=[*range(1, of_samples.dim())]))

    def _loss(self) -> Tensor:
        task = self._task
        if task.x.is_floating_point():  # so that backward reaches the first layer
            task = task._replace(x=task.x * self._one)
        return task.losses("sum")

    def run(self, tape: Tape) -> None:
        """Run a step."""
        self._optimizer.zero_grad(set_to_none=False)
        self._samples.clear()
        for layer in self._hooks.layers:
            if isinstance(layer, nn.Embedding):
                layer.requires_grad_(True)
        self._loss().backward()
        summed = self._sum_kept() if self._keeps else self._sum_again(tape)
        for p in self._trained:
            p.grad = summed.pop(p) + _noise(p)
        with tape.phase("step"):
            self._optimizer.step()

    def _sum_kept(self) -> dict[Tensor, Tensor]:
        samples = self._samples
        norms = [samples[p].reshape(len(samples[p]), -1).norm(2, dim=-1) for p in self._trained]
        factors_B = _factors(norms)
        return {p: torch.einsum("i,i...", factors_B, samples[p]) for p in self._trained}

    def _sum_again(self, tape: Tape) -> dict[Tensor, Any]:
        factors_B = _factors(self._norms)
        self._norms.clear()
        self._hooks.is_on = False
        self._require_gradients(True)
        with tape.left_out():  # as in the source's times
            loss = (self._loss() * factors_B).mean()
        loss.backward()
        self._hooks.is_on = True
        self._require_gradients(False)
        summed = {p: p.grad for p in self._trained}
        for p in self._trained:
            p.grad = None
        return summed


class _TwoPasses:
    """Methods of private_vision and private-transformers: norms in one backward pass, then the sum.

    A layer's norms come from per-sample gradients ("per-layer"), from products of its inputs and
    of its gradients with themselves ("ghost"), or from what needs fewer numbers ("mixed").
    """

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer, *, way: str) -> None:
        self._task, self._optimizer, self._way = task, optimizer, way
        self._trained = [p for p in task.model.parameters() if p.requires_grad]
        self._hooks = _Hooked(task.model, self._compute)
        self._norms: list[Tensor] = []

    def _compute(self, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            columns = functional.unfold(
                x, layer.kernel_size, layer.dilation, layer.padding, layer.stride
            )
            self._norms.append(self._norm_of_columns(columns, gradient.flatten(2)))
            biases = gradient.flatten(2).sum(dim=2)
        elif isinstance(layer, nn.Embedding):
            differs_BTT = ~x[:, :, None].eq(x[:, None, :])
            products = torch.bmm(gradient, gradient.transpose(-1, -2))
            self._norms.append(products.masked_fill(differs_BTT, 0).sum(dim=(1, 2)).sqrt())
            return
        elif isinstance(layer, nn.Linear | Conv1D):
            self._norms.append(self._norm_of_rows(x, gradient))
            biases = gradient.flatten(1, -2).sum(dim=1) if gradient.dim() > 2 else gradient
        else:
            of_weight, biases = _of_norm_layer(layer, x, gradient)
            self._norms.append(of_weight.norm(2, dim=1))
        if layer.bias is not None:
            self._norms.append(biases.norm(2, dim=1))

    def _uses_products(self, T: int, d: int, p: int) -> bool:
        return self._way == "ghost" or (self._way == "mixed" and d * p >= 2 * T**2)

    def _norm_of_columns(self, x_BdT: Tensor, g_BpT: Tensor) -> Tensor:
        if self._uses_products(x_BdT.shape[2], x_BdT.shape[1], g_BpT.shape[1]):
            product = torch.einsum("bji,bjk->bik", x_BdT, x_BdT)
            product *= torch.einsum("bji,bjk->bik", g_BpT, g_BpT)
            return product.sum(dim=(1, 2)).sqrt()
        samples = torch.einsum("bdT,bpT->bdp", x_BdT, g_BpT)
        return (samples**2).sum(dim=(1, 2)).sqrt()

    def _norm_of_rows(self, x: Tensor, gradient: Tensor) -> Tensor:
        T = x.shape[1] if x.dim() > 2 else 1
        if not self._uses_products(T, x.shape[-1], gradient.shape[-1]):
            equation = "bd,bp->bdp" if x.dim() == 2 else "bTd,bTp->bdp"
            return (torch.einsum(equation, x, gradient) ** 2).sum(dim=(1, 2)).sqrt()
        if x.dim() == 2:
            return x.norm(2, dim=1) * gradient.norm(2, dim=1)
        products = [torch.bmm(side, side.transpose(-1, -2)) for side in (x, gradient)]
        return (products[0] * products[1]).sum(dim=(1, 2)).sqrt()

    def run(self, tape: Tape) -> None:
        """Run a step."""
        losses_B = self._task.losses("none")
        losses_B.sum().backward(retain_graph=True)
        self._hooks.is_on = False
        for p in self._trained:
            p.grad = None
        factors_B = _factors(self._norms)
        self._norms.clear()
        (factors_B * losses_B).sum().backward()
        self._hooks.is_on = True
        for p in self._trained:
            assert p.grad is not None
            p.grad += _noise(p)
            p.grad /= len(losses_B)
        with tape.phase("step"):
            self._optimizer.step()
        self._optimizer.zero_grad()


def _of_norm_layer(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the per-sample gradients of weight and bias."""
    if isinstance(layer, nn.GroupNorm):
        normed = functional.group_norm(x, layer.num_groups, eps=layer.eps)
        return torch.einsum("ni...->ni", normed * gradient), torch.einsum("ni...->ni", gradient)
    assert isinstance(layer, nn.LayerNorm)
    normed = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    between = [*range(1, x.dim() - 1)]
    if not between:
        return normed * gradient, gradient
    return (normed * gradient).sum(dim=between), gradient.sum(dim=between)


class _Own:
    """A method of dpprof."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer, name: str) -> None:
        B = len(task.labels)
        experiment = Experiment(model="tiny", seq_len=1, method=name, batch_size=B, device="cuda")
        self._step = registry.load("methods", name)(task.model, experiment)
        self._step.attach_optimizer(optimizer)
        self._batch = Batch(task.x, task.labels)

    def run(self, tape: Tape) -> None:
        """Run a step."""
        self._step.run(self._batch, tape.enter)


def _apply(method: str, task: Task, optimizer: torch.optim.Optimizer) -> _Fork | _TwoPasses | _Own:
    kind, _, way = method.partition("/")
    if kind == "fork":
        return _Fork(task, optimizer, keep=way == "kept")
    if kind == "two-passes":
        return _TwoPasses(task, optimizer, way=way)
    return _Own(task, optimizer, method)


def _optimizers(parameters: Iterator[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """Return optimizers that update one parameter after another, as before PyTorch 2.0."""
    trained = [p for p in parameters if p.requires_grad]
    sgd = partial(torch.optim.SGD, trained, lr=0.1, foreach=False)
    return {
        "sgd": sgd,
        "momentum": partial(sgd, momentum=0.9, weight_decay=5e-4),
        "adam": partial(torch.optim.Adam, trained, foreach=False),
    }


def training(
    tape: Tape, *, model: str, method: str, size: int, B: int, optimizer: str, steps: int
) -> None:
    """Train some steps.

    Args:
        model: What is trained.
        method: ``fork/kept``, ``fork/norms``, ``two-passes/per-layer``, ``two-passes/ghost``,
            ``two-passes/mixed``, or a method of dpprof.
        size: Height and width of images, or tokens.
        B: Samples.
        optimizer: sgd, momentum or adam.
        steps: How many.
    """
    task = _build(model, size, B, is_private=method != "standard")
    chosen = _optimizers(task.model.parameters())[optimizer]()
    stepping = _apply(method, task, chosen)
    for step in range(steps):
        if step == steps - 1:
            tape.mark("last step")
        stepping.run(tape)
    tape.mark("trained")
