"""Without a GPU, Triton's kernels run in its interpreter, which has to be chosen before its import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
