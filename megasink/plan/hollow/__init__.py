"""A hollow GPU: the host side of the CUDA path on a machine without a GPU (README.md).

Stand-ins for libcudart, cuBLAS, NCCL and the driver are loaded in front of an unchanged CUDA build
of torch. Every line on the host runs as on a GPU, and no kernel does: memory is addresses without
pages, and what a kernel would write reads as 0.
"""

from megasink.plan.hollow.compile_libraries import Device, built, environment, missing

__all__ = ["Device", "built", "environment", "missing"]
