"""GPUs that a plan can be made for: peak rate, memory and compute capability."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A GPU, from its vendor's data sheet."""

    teraflops: float  # Peak dense bfloat16 rate of the tensor cores, 10^12 FLOP/s
    gib: float  # Memory in GiB (2^30 bytes), as the driver reports it at most
    capability: int  # Compute capability without the point


# The SXM modules; rates without sparsity.
DEVICES = {
    "a100-40gb": GPU(312.0, 40.0, 80),
    "a100": GPU(312.0, 80.0, 80),
    "h100": GPU(989.4, 80.0, 90),
    "h200": GPU(989.4, 141e9 / 2**30, 90),
    "b200": GPU(2250.0, 180e9 / 2**30, 100),
}
