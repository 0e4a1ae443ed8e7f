"""Copy values from the device to the host in the background."""

import torch
from torch import Tensor


class HostCopy:
    """A copy that is started now and read later, of values that nobody changes.

    It goes to pinned memory behind what the current stream has to do, so that starting it and
    asking for it wait for nothing.
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
        """Return the values on the host; wait for the device if they are not there yet."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._values
