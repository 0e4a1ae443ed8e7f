"""Task for the workers: models on parts of the ranks, each with a group of its own."""

from typing import Any

import torch


def jobs(data: list[int], scope: str, collection: bool = True) -> Any:
    """Train a model on each pair of ranks, in a plain loop; on two ranks it is the whole job."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megasink.megatron import HeadBalance, layer_spec
    from megasink.megatron.initial_weights import initialize_weights

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pairs = [torch.distributed.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    pair, alone = pairs[rank // 2], ranks == 2
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    others = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(**shape, **others, transformer_impl="local")
    options = {"attention_variant": "sink", "head_balance_coeff": 1e2, "head_balance_scope": scope}
    balance = HeadBalance(config, group=None if alone else pair, **options)
    groups: Any = ProcessGroupCollection.use_mpu_process_groups()
    if not alone:
        groups.tp_dp_cp = groups.dp = groups.dp_cp = pair
    given = {"pg_collection": groups} if collection and not alone else {}
    model = GPTModel(config, layer_spec(config), 32, 16, position_embedding_type="rope", **given)
    initialize_weights(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, importances = [], []
    for step in range(3):
        balance.begin(step)
        optimizer.zero_grad()
        for microbatch in range(2):
            seed = 1000 * data[rank // 2] + 100 * step + 10 * microbatch + rank % 2
            text = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(seed))
            where = torch.arange(16).expand(2, -1)
            try:
                loss = model(text[:, :-1], where, None, labels=text[:, 1:]).mean()
            except RuntimeError as error:
                return str(error)
            balance.set_loss_scale(torch.ones(1) / 2)
            (loss / 2).backward()
        balance.reduce()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad, group=pair)
            parameter.grad /= 2
        optimizer.step()
        balance.commit()
        losses.append(float(loss))
        importances.append(balance.last.importance_LH.tolist())
    layers = model.decoder.layers
    counters = [layer.self_attention.core_attention.head_counter for layer in layers]
    return losses, importances, [counter.coefficients.tolist() for counter in counters]
