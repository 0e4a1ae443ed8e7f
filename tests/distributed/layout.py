"""A parallel layout, as data: importable without torch or megatron."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the ranks of one task are arranged.

    Attributes:
        tp, pp, cp, dp: tensor-, pipeline-, context- and data-parallel sizes.
        vpp: virtual pipeline stages per rank; None for no interleaving.
        sp: sequence parallelism over the tensor-parallel ranks.
        ep: expert-parallel size; its ranks are among those of tp * cp * dp.
        etp: tensor-parallel size of the experts; None for tp.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int | None = None
    sp: bool = False
    ep: int = 1
    etp: int | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        parts = [f"{n}{v}" for n, v in vars(self).items() if n != "sp" and v not in (1, None)]
        parts += ["sp"] if self.sp else []
        return "-".join(parts) or "single"


SINGLE = Layout()
