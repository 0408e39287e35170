"""Observes the roles of tensors while a step runs, and allocates no memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as every_module

from dpprof.experiments.records.terms import Phase
from dpprof.predict.memory.exchanges import find_gathered
from dpprof.predict.memory.owners import BACKPROPS, DP_ACTIVATIONS, LOGITS, SAVED
from dpprof.predict.memory.recorder import Recorder
from dpprof.private.graph.nodes import nodes_behind
from dpprof.private.norms.code_paths import CodePath, Watch
from dpprof.private.refusals.gradient_hooks import Looking
from dpprof.subjects.methods.tensors import tensors_in
from dpprof.subjects.methods.training_step import Batch, Enter, TrainingStep
from dpprof.subjects.models.quantized import scales_of

_NAME_OF_MODEL = "(model)"
_WRAPPED = ("_module", "module")
"""The only children of the wrappers of Opacus and of DDP."""


class _Saved:
    """Holds a tensor that autograd keeps; records when autograd releases it."""

    __slots__ = ("number", "recorder", "tensor")

    def __init__(self, tensor: Tensor, number: int, recorder: Recorder) -> None:
        self.tensor = tensor
        self.number = number
        self.recorder = recorder
        recorder.note_saved(number, saved=True)

    def __del__(self) -> None:
        self.recorder.note_saved(self.number, saved=False)


class StepObserver:
    """Records which tensors parameters, optimizer, hooks and autograd hold.

    The recorder must be active already, so that it knows the storages. ``watch`` is called in place
    of each sampler, as ``TrainingStep.watch_samplers`` asks.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, enter: Enter, watch: Watch) -> None:
        self._recorder = recorder
        self._watch = watch
        self._step = step
        self._enter = enter
        *wrappers, model = _unwrap(step.module)
        self._layers: dict[Any, str] = {
            parameter: _name_layer(name) for name, parameter in model.named_parameters()
        }
        self._names = {module: name for name, module in model.named_modules()}
        self._roots = {*wrappers, model}
        if step.experiment.loss == "labels":  # what is wrapped returns the logits, and their loss
            self._roots.update(model.children())
        self._names |= dict.fromkeys(self._roots, _NAME_OF_MODEL)
        self._saving = ExitStack()
        for parameter, layer in self._layers.items():
            recorder.give_role(parameter, "parameters", layer)
        for name, buffer in model.named_buffers():
            recorder.give_role(buffer, "parameters", _name_layer(name))
        for name, module in model.named_modules():
            for scales in scales_of(module):
                recorder.give_role(scales, "quantization_scales", name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the steps within."""
        with ExitStack() as watching:
            watching.callback(self._saving.close)
            hooks = [
                every_module.register_module_forward_pre_hook(self._before_forward),
                every_module.register_module_forward_hook(self._after_forward, always_call=True),
            ]
            hooks += [
                parameter.register_hook(Looking(self._note_gradient, layer))
                for parameter, layer in self._layers.items()
                if parameter.requires_grad
            ]
            for hook in hooks:
                watching.callback(hook.remove)
            watching.enter_context(self._step.watch_samplers(self._watch_sampler))
            yield

    def run(self, batch: Batch) -> None:
        """Run one step and observe it."""
        for tensor in batch:
            self._recorder.give_role(tensor, "inputs")
        self._step.run(batch, self.enter)

    def enter(self, phase: Phase) -> None:
        """Record roles at the end of a phase, and begin the next one."""
        self.look()
        # torch.func does not work under these hooks. Tensors are packed only in forward.
        self._saving.close()
        if phase == "forward":
            self._saving.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            )
        self._recorder.enter(phase)
        self._enter(phase)

    def look(self) -> None:
        """Record which tensors parameters, the optimizer and hooked layers hold now."""
        give_role = self._recorder.give_role
        for parameter, layer in self._layers.items():
            if parameter.grad is not None:
                give_role(parameter.grad, "gradients", layer)
            for name, value in vars(parameter).items():
                for tensor in tensors_in(value):
                    role = self._step.attributes.get(name) or _role_by_shape(tensor, parameter)
                    give_role(tensor, role, layer)
            for component, held in self._step.held_for(parameter):
                for tensor in tensors_in(held):
                    give_role(tensor, component, layer)
        for key, of_one in self._step.optimizer.state.items():
            for tensor in tensors_in(of_one):
                give_role(tensor, "optimizer_state", self._layers.get(key))
        inner = getattr(self._step.optimizer, "original_optimizer", self._step.optimizer)
        for tensor in tensors_in(vars(inner).get("name2qmap")):  # of bitsandbytes, for all states
            give_role(tensor, "optimizer_state")
        self._look_at_modules()

    def _look_at_modules(self) -> None:
        for module in self._names:
            for tensor in tensors_in(vars(module).get("activations")):
                self._recorder.give_role(tensor, DP_ACTIVATIONS)
        for module, tensor in find_gathered(self._step.module):
            self._recorder.give_layer(tensor, self._names.get(module, _NAME_OF_MODEL))

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        number = self._recorder.find(tensor)
        return tensor if number is None else _Saved(tensor, number, self._recorder)

    @staticmethod
    def _unpack(packed: "Tensor | _Saved") -> Tensor:
        return packed.tensor if isinstance(packed, _Saved) else packed

    def _note_gradient(self, layer: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # a function may return none for a parameter
            self._recorder.give_role(gradient, "gradients", layer)

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        # A module outside of the model, such as a loss, counts as its caller.
        modules = self._recorder.callers.modules
        modules.append(self._names.get(module) or (modules[-1] if modules else None))

    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._recorder.callers.modules.pop()
        if module in self._roots:
            for tensor in tensors_in(output):
                self._recorder.give_role(tensor, LOGITS)
                # Python's autograd functions keep tensors as attributes, without hooks.
                for node in nodes_behind(tensor):
                    if isinstance(node, BackwardCFunction):
                        for kept in tensors_in(vars(node)):
                            self._recorder.give_role(kept, SAVED)

    def _watch_sampler(
        self,
        layer: nn.Module,
        path: CodePath,
        sampler: Callable[..., Any],
        inputs: tuple[Any, ...],
    ) -> Any:
        recorder = self._recorder
        for number, argument in enumerate(inputs, start=1):
            for tensor in tensors_in(argument):
                recorder.give_role(tensor, BACKPROPS if number == len(inputs) else DP_ACTIVATIONS)
        recorder.callers.sampler = (path, self._names.get(layer, type(layer).__name__))
        try:
            returned = self._watch(layer, path, sampler, inputs)
        finally:
            recorder.callers.sampler = None
        for tensor in tensors_in(returned):
            one_a_sample = tensor.dim() == 1
            recorder.give_role(tensor, "norm_samples" if one_a_sample else "per_sample_gradients")
        return returned


def _name_layer(parameter: str) -> str:
    """Return the module of a parameter or buffer, both by name."""
    return parameter.rpartition(".")[0] or _NAME_OF_MODEL


def _unwrap(module: nn.Module) -> list[nn.Module]:
    """List a model's wrappers, the outermost first, and the model."""
    modules = [module]
    while len(children := list(modules[-1].named_children())) == 1 and children[0][0] in _WRAPPED:
        modules.append(children[0][1])
    return modules


def _role_by_shape(tensor: Tensor, parameter: Tensor) -> str:
    """Guess the role of an unknown attribute of a parameter by its shape."""
    if tensor.shape == parameter.shape:
        return "summed_gradients"
    if tensor.shape[1:] == parameter.shape:
        return "per_sample_gradients"
    return "norm_samples" if tensor.dim() == 1 else "unattributed"
