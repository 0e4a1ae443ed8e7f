"""Copy values from the device to the host in the background."""

import torch
from torch import Tensor


class HostCopy:
    """A copy, started now and read later, of values that do not change.

    It goes to pinned memory after the current stream's work, so starting it and asking for it do
    not wait.
    """

    def __init__(self, values: Tensor):
        # To the host, `non_blocking` allocates pinned memory.
        self._values = values.detach().to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda and self._values is not values:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_here(self) -> bool:
        """Whether `read` returns without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> Tensor:
        """Return the values on the host; wait for the device if necessary."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._values
