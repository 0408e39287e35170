"""Evidence of who owns what, gathered while a step runs, without allocating anything."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as every_module

from dpprof.clipping.graph import nodes_behind
from dpprof.memory.owners import BACKPROPS, DP_ACTIVATIONS, LOGITS, SAVED
from dpprof.memory.recorder import Recorder
from dpprof.methods.tensors import tensors_in
from dpprof.methods.training_step import Batch, Enter, TrainingStep, Watch
from dpprof.norms.code_paths import CodePath
from dpprof.records.terms import Phase

_NAME_OF_MODEL = "(model)"
_WRAPPER = "_module."
"""What Opacus's wrappers put before the name of every module."""


class _Saved:
    """Stands for a tensor that autograd keeps; says so when it is let go."""

    __slots__ = ("number", "recorder", "tensor")

    def __init__(self, tensor: Tensor, number: int, recorder: Recorder) -> None:
        self.tensor = tensor
        self.number = number
        self.recorder = recorder
        recorder.note_saved(number, saved=True)

    def __del__(self) -> None:
        self.recorder.note_saved(self.number, saved=False)


class Witness:
    """Sees who holds what: where parameters, optimizer, hooks and autograd keep tensors.

    Args:
        recorder: Where it is noted; active already, so that it knows the storages.
        step: Whose tensors are watched.
        enter: Called as each phase begins.
        watch: Called in place of each sampler, as ``TrainingStep.watch_samplers`` asks.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, enter: Enter, watch: Watch) -> None:
        self._recorder = recorder
        self._watch = watch
        self._step = step
        self._pass_on = enter
        self._parameters = list(step.module.parameters())
        self._names = {
            module: name.replace(_WRAPPER, "") for name, module in step.module.named_modules()
        }
        self._roots = {module for module, name in self._names.items() if name in ("", "_module")}
        self._names |= dict.fromkeys(self._roots, _NAME_OF_MODEL)
        self._saving: ExitStack | None = None
        for tensor in (*self._parameters, *step.module.buffers()):
            recorder.give_role(tensor, "parameters")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps within."""
        with ExitStack() as watching:
            watching.callback(self._end_saving)
            hooks = [
                every_module.register_module_forward_pre_hook(self._before_forward),
                every_module.register_module_forward_hook(self._after_forward, always_call=True),
            ]
            hooks += [
                parameter.register_hook(self._see_gradient)  # type: ignore[no-untyped-call]
                for parameter in self._parameters
                if parameter.requires_grad
            ]
            for hook in hooks:
                watching.callback(hook.remove)
            watching.enter_context(self._step.watch_samplers(self._watch_sampler))
            yield

    def run(self, batch: Batch) -> None:
        """Run one step, watched."""
        for tensor in batch:
            self._recorder.give_role(tensor, "inputs")
        self._step.run(batch, self.enter)

    def enter(self, phase: Phase) -> None:
        """Look around where a phase ends, and begin the next one."""
        self.look()
        # torch.func refuses to work under these hooks, and what is saved is packed in
        # forward: so they are there in forward alone.
        self._end_saving()
        if phase == "forward":
            self._saving = ExitStack()
            self._saving.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            )
        self._recorder.enter(phase)
        self._pass_on(phase)

    def look(self) -> None:
        """Note what parameters, the optimizer and hooked layers hold just now."""
        see = self._recorder.give_role
        known = self._step.attributes
        for parameter in self._parameters:
            if parameter.grad is not None:
                see(parameter.grad, "gradients")
            for name, value in vars(parameter).items():
                for tensor in tensors_in(value):
                    see(tensor, known.get(name) or _role_by_shape(tensor, parameter))
        for of_one in self._step.optimizer.state.values():
            for tensor in tensors_in(of_one):
                see(tensor, "optimizer_state")
        for module in self._names:
            for tensor in tensors_in(vars(module).get("activations")):
                see(tensor, DP_ACTIVATIONS)

    def _end_saving(self) -> None:
        if self._saving is not None:
            self._saving.close()
            self._saving = None

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        number = self._recorder.find(tensor)
        return tensor if number is None else _Saved(tensor, number, self._recorder)

    @staticmethod
    def _unpack(packed: "Tensor | _Saved") -> Tensor:
        return packed.tensor if isinstance(packed, _Saved) else packed

    def _see_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # a function may have none for a parameter
            self._recorder.give_role(gradient, "gradients")

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        # What is no part of the model, such as a loss or functorch's copy of a layer, counts
        # as what called it.
        modules = self._recorder.modules
        modules.append(self._names.get(module) or (modules[-1] if modules else None))

    def _after_forward(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._recorder.modules.pop()
        if module in self._roots:
            for tensor in tensors_in(output):
                self._recorder.give_role(tensor, LOGITS)
                self._see_what_functions_keep(tensor)

    def _see_what_functions_keep(self, output: Tensor) -> None:
        """Note what Python's autograd functions keep on themselves, past autograd's hooks."""
        for node in nodes_behind(output):
            if isinstance(node, BackwardCFunction):
                for tensor in tensors_in(vars(node)):
                    self._recorder.give_role(tensor, SAVED)

    def _watch_sampler(
        self,
        layer: nn.Module,
        path: CodePath,
        sampler: Callable[..., Any],
        inputs: tuple[Any, ...],
    ) -> Any:
        recorder = self._recorder
        for number, given in enumerate(inputs, start=1):
            for tensor in tensors_in(given):
                recorder.give_role(tensor, BACKPROPS if number == len(inputs) else DP_ACTIVATIONS)
        recorder.sampler = (path, self._names.get(layer, type(layer).__name__))
        try:
            returned = self._watch(layer, path, sampler, inputs)
        finally:
            recorder.sampler = None
        for tensor in tensors_in(returned):
            one_a_sample = tensor.dim() == 1
            recorder.give_role(tensor, "norm_samples" if one_a_sample else "per_sample_gradients")
        return returned


def _role_by_shape(tensor: Tensor, parameter: Tensor) -> str:
    """Guess what an unknown attribute of a parameter is, by the shape that it must have."""
    if tensor.shape == parameter.shape:
        return "summed_gradients"
    if tensor.shape[1:] == parameter.shape:
        return "per_sample_gradients"
    return "norm_samples" if tensor.dim() == 1 else "unattributed"
