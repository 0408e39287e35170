"""The named sizes of dpprof's transformer."""

from dpprof.experiments.config.naming import Dimensions

TINY = Dimensions(vocab_size=1_000, d_model=64, layers=2, heads=4)
SMALL = Dimensions(vocab_size=8_000, d_model=256, layers=4, heads=8)
MEDIUM = Dimensions(vocab_size=16_000, d_model=512, layers=8, heads=8)
ONE_BILLION = Dimensions(vocab_size=32_000, d_model=2_048, layers=24, heads=32)
