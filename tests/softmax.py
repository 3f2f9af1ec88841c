"""Softmax and its logarithm in float64, along the last axis."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(scores: Any) -> NDArray[np.float64]:
    return np.exp(log_softmax(scores))


def log_softmax(scores: Any) -> NDArray[np.float64]:
    wide = np.asarray(scores, np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
