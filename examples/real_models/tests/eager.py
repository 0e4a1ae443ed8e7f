"""A Llama in transformers' eager attention, with all that passes through it kept.

Shapes: L layers, H heads, T tokens, D head dim, E hidden size, C channels of the MLP, S states of
the residual stream, V vocabulary.
"""

from collections import defaultdict

import torch
from torch.nn.functional import cross_entropy
from transformers.models.llama import modeling_llama


class Pass:
    """What one text made; float64. Keys and values are repeated for the query heads of a group.

    Attributes:
        nats_T: loss of tokens 1 on; last_V: logits behind the last.
        map_LHTT, query_LHTD, key_LHTD, value_LHTD: attention; queries and keys as it sees them.
        out_LHTD: what enters W_O; branch_LTE: what leaves it.
        up_LTC, gate_LTC: of the MLP, the gate after its activation; mlp_LTE: what it returns.
        state_STE: the embedding, then after attention and after the MLP of every block.
    """

    def __init__(self, ids, logits_TV, kept):
        self.nats_T = cross_entropy(
            logits_TV[:-1].double(), torch.tensor(ids[1:]), reduction="none"
        )
        self.last_V = logits_TV[-1].double()
        self._kept = {name: torch.stack(values) for name, values in kept.items()}

    def __getattr__(self, name):
        # float64 is made when it is read: a long text takes half a gigabyte.
        if name.partition("_")[0] not in vars(self).get("_kept", {}):
            raise AttributeError(name)
        return self._kept[name.partition("_")[0]].double()


def passed(model, ids, change=None):
    """Return the `Pass` of a text.

    Args:
        change: of layer, map_HTT and value_HTD; returns heads' outputs [H, T, D].
    """
    kept, handles = defaultdict(list), []
    eager = modeling_llama.eager_attention_forward

    def attention(module, query, key, value, *args, **options):
        out, maps = eager(module, query, key, value, *args, **options)
        repeats = query.shape[1] // key.shape[1]
        value_HTD = value[0].repeat_interleave(repeats, 0)
        if change is not None:
            out = change(module.layer_idx, maps[0], value_HTD)[None].transpose(1, 2).contiguous()
        kept["map"].append(maps[0])
        kept["query"].append(query[0])
        kept["key"].append(key[0].repeat_interleave(repeats, 0))
        kept["value"].append(value_HTD)
        kept["out"].append(out[0].transpose(0, 1))
        return out, maps

    def keep_input(module, name):
        hook = module.register_forward_pre_hook(lambda _, args: kept[name].append(args[0][0]))
        handles.append(hook)

    def keep_output(module, name):
        hook = module.register_forward_hook(lambda _m, _a, out: kept[name].append(out[0]))
        handles.append(hook)

    for block in model.model.layers:
        keep_input(block.input_layernorm, "state")
        keep_output(block.self_attn.o_proj, "branch")
        keep_input(block.post_attention_layernorm, "state")
        keep_output(block.mlp.up_proj, "up")
        keep_output(block.mlp.act_fn, "gate")
        keep_output(block.mlp, "mlp")
    keep_input(model.model.norm, "state")
    modeling_llama.eager_attention_forward = attention
    try:
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        modeling_llama.eager_attention_forward = eager
        for handle in handles:
            handle.remove()
    return Pass(ids, logits_TV, kept)
