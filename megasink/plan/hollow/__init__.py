"""A hollow GPU: the host side of the CUDA path on a machine without a GPU.

Stand-ins for libcudart, cuBLAS, NCCL and the driver are loaded in front of an unchanged CUDA build
of torch. Every line on the host runs as on a GPU: the checks of kernels, the caching allocator,
streams, distributed data parallelism, the distributed optimizer, ProcessGroupNCCL. No kernel does.
Launches, copies, waits and collectives are reported to listeners (tests/plan/hollow/events.py),
and memory is allocated as addresses without pages: the model of an 80 GB device fits anywhere.

It shows that a configuration starts and steps, how many kernels, copies, waits and bytes of
collectives a step costs, its peak memory, and the strides and addresses that kernels are given.
It cannot show numbers, because everything that a kernel would write reads as 0. Time, cuDNN,
TransformerEngine and CUDA graphs are not covered either. README.md has the details.

    build.py    compiles native/ into a cache folder
    process.py  the environment of a process that runs on it
    world.py    one rank of many, in such a process
"""

from megasink.plan.hollow.build import built, missing
from megasink.plan.hollow.process import Device, environment

__all__ = ["Device", "built", "environment", "missing"]
