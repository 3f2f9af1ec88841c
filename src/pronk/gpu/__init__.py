"""Runner of a target model on one NVIDIA GPU (the extra ``gpu``: torch and Triton); experimental.

The promise is that of the CPU kernels: the bits of a row depend on its own text alone. The kernels
are written in Triton (:mod:`pronk.gpu.gemm`, :mod:`pronk.gpu.attention`, :mod:`pronk.gpu.rows`,
:mod:`pronk.gpu.choose`); :mod:`pronk.gpu.model` has the layers, :mod:`pronk.gpu.steps` the captured
steps, and :mod:`pronk.gpu.runner` what the engine calls. They are built and tested in Triton's
interpreter, and not measured on a device yet.
"""
