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
        yield (
            "--optimizer dist_muon is Megatron's old name: use --optimizer muon "
            "--use-distributed-optimizer"
        )
    if name == "adaptive_muon":
        yield "--optimizer adaptive_muon is not tested: use --optimizer muon"
    if args.fp16:
        yield f"--optimizer {name} with --fp16: use --bf16"
    if args.use_distributed_optimizer:
        yield from _sharded(args, name)
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    ranks = args.tensor_model_parallel_size
    if args.muon_split_qkv and groups and groups < ranks:
        yield (
            f"--optimizer {name} with {groups} key/value groups on --tensor-model-parallel-size "
            f"{ranks}: a rank has only part of a group, which cannot be split into query, key and "
            f"value; use at most {groups} ranks"
        )


def _sharded(args: Namespace, name: str) -> Iterator[str]:
    flags = f"--optimizer {name} with --use-distributed-optimizer"
    if not args.bf16:
        yield f"{flags} fails in Megatron without --bf16: add it, or drop the distributed optimizer"
    if args.num_experts:
        yield f"{flags} and experts is not tested: drop --use-distributed-optimizer"
    if args.num_distributed_optimizer_instances > 1:
        yield (
            f"{flags} keeps each matrix whole on one replica: drop "
            f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances}"
        )
    if not args.use_layer_wise_param_layout:
        yield f"{flags} needs layer-wise buffers: drop --no-use-layer-wise-param-layout"
