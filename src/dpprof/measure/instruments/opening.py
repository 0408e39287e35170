"""Opens an experiment in this process: its method, and its device with its limits."""

from dpprof.experiments.config.experiment import Experiment
from dpprof.measure.devices.device import Device
from dpprof.measure.devices.selection import open_device
from dpprof.subjects.methods.training_step import TrainingStep
from dpprof.subjects.setup import import_method


def open_experiment(experiment: Experiment) -> tuple[type[TrainingStep], Device]:
    """Import what the experiment needs, and return its method and its prepared device."""
    method = import_method(experiment)
    device = open_device(experiment.device)
    device.prepare(experiment)
    return method, device
