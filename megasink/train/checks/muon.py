"""Checks of Muon."""

import importlib.util
from argparse import Namespace
from collections.abc import Iterator


def problems(args: Namespace) -> Iterator[str]:
    name = args.optimizer or ""
    if "muon" not in name:
        return
    if importlib.util.find_spec("emerging_optimizers") is None:
        yield f"--optimizer {name} needs a package: pip install 'megasink[muon]'"
    if name == "dist_muon":
        yield "--optimizer dist_muon: Megatron 0.19 does not train with it: use --optimizer muon"
    if name == "adaptive_muon":
        yield "--optimizer adaptive_muon is not tested: use --optimizer muon"
    if args.fp16:
        yield f"--optimizer {name} with --fp16: use --bf16"
    if args.use_distributed_optimizer:
        yield (
            f"--optimizer {name} with --use-distributed-optimizer fails in Megatron 0.19: drop "
            "the flag (every replica then keeps the whole optimizer state)"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    ranks = args.tensor_model_parallel_size
    if args.muon_split_qkv and groups and groups < ranks:
        yield (
            f"--optimizer {name} with {groups} key/value groups on --tensor-model-parallel-size "
            f"{ranks}: a rank has only part of a group, which cannot be split into query, key and "
            f"value; use at most {groups} ranks"
        )
