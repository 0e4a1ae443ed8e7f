"""MLP activations and normed states of a transformers model, found by module name.

Shapes: B rows, T tokens, F intermediate size, E hidden size.
"""

import torch

from megasink.analysis.capture.sites import BLOCKS, PRODUCT, UP, Site, Sites, tensor_of
from megasink.transformers.blocks import Block, child

DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2")
_UP = ("up_proj", "w3", "c_fc", "dense_h_to_4h", "fc1")
_FUSED = "gate_up_proj"  # [gate; up]
_BEFORE = ("input_layernorm", "ln_1", "operator_norm", "attention_norm")


def transformers_sites(blocks: list[Block]) -> Sites:
    """Return the sites in the first blocks."""
    sites = Sites()
    _add_mlp(sites, blocks[0].mlp)
    for index, block in enumerate(blocks[:BLOCKS]):
        norms: list[tuple[int, torch.nn.Module | None]] = [
            (2 * index, child(block.module, _BEFORE))
        ]
        if not block.parallel:  # there the MLP reads the block's input too
            is_norm = block.middle is not block.mlp
            norms.append((2 * index + 1, block.middle if is_norm else None))
        for half, norm in norms:
            if norm is None:
                sites.lacks_norm(half)
            else:
                sites.available.append(Site(str(half), norm, lambda _, out: tensor_of(out)))
    return sites


def _add_mlp(sites: Sites, mlp: torch.nn.Module | None) -> None:
    down = None if mlp is None else child(mlp, DOWN)
    if mlp is None or down is None:
        reason = f"block 0 has no MLP with {', '.join(DOWN)}: experts have no common activation"
        sites.missing[PRODUCT] = sites.missing[UP] = reason
        return
    sites.available.append(Site(PRODUCT, down, lambda product, _: product))
    up, fused = child(mlp, _UP), child(mlp, (_FUSED,))
    if up is not None:
        sites.available.append(Site(UP, up, lambda _, out: out))
    elif fused is not None:
        sites.available.append(Site(UP, fused, lambda _, out: out.chunk(2, -1)[1]))
    else:
        sites.missing[UP] = f"the MLP of block 0 has no {', '.join(_UP)} or {_FUSED}"
