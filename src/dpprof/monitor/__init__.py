"""Monitor any training loop: FLOPs, MFU and throughput, at a configurable frequency."""

from dpprof.ledger.model_flops import model_flops_per_token
from dpprof.monitor.metrics import Metrics
from dpprof.monitor.sinks import Sink, TensorBoard, WeightsAndBiases
from dpprof.monitor.training import Monitor

__all__ = [
    "Metrics",
    "Monitor",
    "Sink",
    "TensorBoard",
    "WeightsAndBiases",
    "model_flops_per_token",
]
