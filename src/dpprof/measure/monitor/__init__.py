"""Monitor any training loop: FLOPs, MFU and throughput, at a configurable frequency."""

from dpprof.measure.monitor.metrics import Metrics
from dpprof.measure.monitor.monitor import Monitor
from dpprof.measure.monitor.sinks import Sink, WeightsAndBiases
from dpprof.measure.traces.tensorboard_events import TensorBoard
from dpprof.predict.flops.counter import model_flops_per_token

__all__ = ["Metrics", "Monitor", "Sink", "TensorBoard", "WeightsAndBiases", "model_flops_per_token"]
