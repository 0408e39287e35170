"""Strategies of correlated noise as dense matrices."""

import numpy as np
from scipy.linalg import toeplitz


def triangle(column, n: int):
    """Make a Toeplitz lower triangle."""
    return np.tril(toeplitz(np.pad(column, (0, n - len(column)))))


def matrix(strategy):
    """Return the strategy matrix C."""
    made = triangle(strategy.coefficients, strategy.steps)
    return made if strategy.is_sampled else np.linalg.inv(made)
