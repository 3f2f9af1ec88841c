"""The tiny models of the tests as modules of training."""

from functools import cache
from typing import Any

import tiny_models
from oracle import torch_dtype
from pronk.base.arrays import FLOAT32, DType
from pronk.train.modules.decoder import DecoderModule


@cache
def tiny_module(dtype: DType = FLOAT32, **shape: Any) -> DecoderModule:
    """Return the module with the weights of :func:`tiny_models.tiny_module`."""
    model = tiny_models.tiny_module(dtype, **shape)
    module = DecoderModule(model.config)
    module.load_state_dict(model.state_dict())
    return module.to(torch_dtype(dtype)).requires_grad_(requires_grad=False).eval()
