"""Rotary angles of packed documents.

Shapes: T tokens of this rank, D rotated channels.
"""

from typing import Any

import torch

from megasink.megatron.microbatch_documents import Documents, PackedRow


def rotate_by_document(module: torch.nn.Module) -> None:
    """Rotate the tokens of a `PackedRow` by their positions in their documents.

    `module` is a HybridModel, or a layer with latent attention, which rotates by itself. Megatron's
    tables [positions, 1, 1, D] become [T, 1, 1, D], once per microbatch and stage, or layer.
    """
    rotary: Any = getattr(module, "rotary_pos_emb", None)
    if rotary is None:  # no, learned or sinusoidal positions
        return
    angles = _Angles()
    module.register_forward_pre_hook(angles.begin, with_kwargs=True)
    rotary.register_forward_pre_hook(angles.keep_whole, with_kwargs=True)
    rotary.register_forward_hook(angles.of_tokens)


class _Angles:
    """Hooks of one module; `documents` are those of the microbatch that runs forward."""

    def __init__(self) -> None:
        self.documents: Documents | None = None

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        params = kwargs.get("packed_seq_params")
        self.documents = params.documents if isinstance(params, PackedRow) else None

    def keep_whole(
        self, rotary: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Keep Megatron from taking the rows of this context-parallel rank's chunks."""
        return None if self.documents is None else (args, kwargs | {"packed_seq": True})

    def of_tokens(self, rotary: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.documents is None:
            return None
        table, *factor = output if isinstance(output, tuple) else (output,)  # YaRN has a factor
        table = table[self.documents.positions(table.device)]
        return (table, *factor) if factor else table
