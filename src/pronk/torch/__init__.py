"""Backend of torch (the extra ``torch``), for accelerators and processors without pronk's kernels."""
