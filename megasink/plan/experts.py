"""Route the same number of tokens to each expert, because a hollow GPU computes no routing.

With the alltoall dispatcher, the host waits for counts to size the exchange. On the hollow
GPU they read as 0, and nothing would be exchanged.
"""

from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def share_tokens_equally() -> None:
    """Let the router send the same number of tokens to each expert, on every rank.

    Applies to the rest of the process, which has imported Megatron and has a hollow GPU.
    """
    inner = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def copied(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        tokens_per_expert = inner(self, point, tokens_per_expert)
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert  # with padding the host knows the sizes
        self.num_out_tokens = self.routing_map.shape[0] * self.config.moe_router_topk
        of_expert = self.num_out_tokens // self.num_experts  # from each rank
        ranks, local = self.ep_size * self.tp_size, self.num_local_experts
        if ranks > 1:
            self.input_splits[:] = self.output_splits[:] = of_expert * local
            self.output_splits_tp[:] = of_expert * local * self.ep_size
        if local > 1:
            self.num_global_tokens_per_local_expert[:] = of_expert
        tokens_per_expert[:] = of_expert * ranks
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = copied
