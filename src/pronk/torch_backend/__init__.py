"""Backend of torch (``pronk[torch]``), for accelerators and processors without pronk's kernels."""
