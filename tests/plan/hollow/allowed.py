"""The lines at which the host may wait for the device in a step, by their text.

Megatron 0.19 waits about twenty times in a step that it does not log: for the norm of the
gradients, its checks of NaN, losses that other ranks have. What is ours stands here with how often.
"""

from typing import Any

_PACKING = "megasink.training.forward_step"
_RERUN, _UTILS = "megatron.core.rerun_state_machine", "megatron.training.utils.common_utils"
_TRAINING = "megatron.training.training"
_EXPERTS = "megatron.core.transformer.moe.token_dispatcher"

MEGASINK = {
    # Boundaries of documents that another rank has read, once for each of two microbatches.
    (_PACKING, 'rows = (batch["cu_seqlens"] if on_host is None else on_host).tolist()'): 2,
}
MEGATRON = {
    (
        "megatron.core.optimizer.clip_grads",
        "total_norm = total_norm.item() ** (1.0 / norm_type)",
    ),
    (_RERUN, "if result_rejected:"),
    (_RERUN, "return val_tensor.item() > 0"),
    (_RERUN, "val_tensor: torch.Tensor = torch.tensor([value], dtype=torch.int32, device='cuda')"),
    (_TRAINING, "loss_scale = optimizer.get_loss_scale().item()"),
    (_TRAINING, "total_loss_dict.get(key, torch.tensor([0.0], dtype=torch.float, device='cuda'))"),
    (_UTILS, "if stat.item() == -1.0:"),
    (_UTILS, "input = torch.tensor([input], dtype=torch.int, device=torch.cuda.current_device())"),
    (_UTILS, "return bool(input.item())"),
    (_UTILS, "return stat.item()"),
    (
        _UTILS,
        "stat = torch.tensor([stat], dtype=torch.float32, device=torch.cuda.current_device())",
    ),
    # Between pipeline stages that are not interleaved, each time.
    ("megatron.core.pipeline_parallel.p2p_communication", "torch.cuda.synchronize()"),
    # How many tokens an expert gets is known on the device alone.
    (_EXPERTS, "self.local_probs = self.local_probs.T.contiguous().masked_select("),
    (_EXPERTS, "tokens_per_expert = self.local_map.sum(dim=0).long().cpu()"),
    (_EXPERTS, "self.d2h_event.synchronize()"),
}
# In a step of packed documents.
PACKED = {
    ("megatron.core.utils", "n = int(n.item())"),  # on a rank that another rank reads for
    ("megatron.core.utils", "n_tensor = torch.tensor(n, dtype=torch.int64, device=dev)"),
    (_TRAINING, "total_real_tokens, seqlen_squared_sum = t.tolist()"),
}
# In a step that Megatron logs.
LOGGING = {
    ("megatron.core.timers", "torch.cuda.synchronize()"),
    (_TRAINING, "avg = total_loss_dict[key].item() / float("),
    (_TRAINING, "total_loss_dict[key] = torch.tensor([0.0], dtype=torch.float, device='cuda')"),
}


def unexpected(found: dict[str, Any], flags: list[str]) -> list[str]:
    """The other waits of a step with these flags, and ours where they are more than allowed."""
    upstream = MEGATRON
    if "--log-interval" in flags:
        upstream = upstream | LOGGING
    if "--dataloader-inter-document-masking" in flags:
        upstream = upstream | PACKED
    return [
        f"{what} in {module}: {text} ({count})"
        for what, module, text, count in found["waits"]
        if (module, text) not in upstream and count > MEGASINK.get((module, text), 0)
    ]
