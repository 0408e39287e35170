"""Monitor any training loop: FLOPs, MFU and throughput, at a configurable frequency."""

from dpprof.flops.model_flops import model_flops_per_token
from dpprof.monitor.metrics import Metrics
from dpprof.monitor.monitor import Monitor
from dpprof.monitor.sinks import Sink, TensorBoard, WeightsAndBiases

__all__ = ["Metrics", "Monitor", "Sink", "TensorBoard", "WeightsAndBiases", "model_flops_per_token"]
