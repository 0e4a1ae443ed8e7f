"""Checks recipes as a rank does, and counts their parameters, in a process of its own.

Reads {"lines": [[flags, ranks], ...], "models": {name: flags}} from standard input; writes on its
last line {"lines": [[[problem, ...], target of an export, or why there is none], ...], "models":
{name: [parameters, those of the embedding and the output layer]}}.
"""

import contextlib
import json
import os
import sys
from argparse import Namespace

from megasink.cpu.prepare_process import prepare_process
from megasink.errors import ConfigError


def parse(flags: list[str], ranks: int) -> Namespace:
    """The arguments of rank 0 of so many."""
    from megasink.training import parse_arguments

    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    return parse_arguments.parse(flags)[0]


def problems(flags: list[str], ranks: int) -> tuple[list[str], str]:
    """What is wrong with a command line: by our checks, Megatron's, and its configuration; and what
    its model is exported as.
    """
    from megasink.megatron.model_of_arguments import model_config
    from megasink.training.parse_arguments import refusals_of_megatron

    try:
        args = parse(flags, ranks)
        with refusals_of_megatron():
            model_config(args).finalize()
    except ConfigError as error:
        return error.problems, ""
    return [], target(args)


def target(args: Namespace) -> str:
    """The target of the model's export, or why it has none."""
    from megasink.checkpoints.model_arguments import plain
    from megasink.convert.architecture_of_run import architecture_of
    from megasink.convert.targets import choose

    saved = {name: plain(value) for name, value in vars(args).items()}
    model, unsupported = architecture_of(saved | {"padded_vocab_size": args.vocab_size + 1}, None)
    return "; ".join(unsupported) or choose(model)[0].name


def parameters(flags: list[str]) -> tuple[int, int]:
    """Of the model that one rank builds, on the meta device."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasink.megatron.model_of_arguments import model_config

    config = model_config(parse(flags, 1))
    config.transformer.perform_initialization = False
    with torch.device("meta"):
        (model,) = (
            config.get_builder_cls()(config).build_model(
                ProcessGroupCollection.use_mpu_process_groups()
            ),
        )
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    return sum(counts.values()), sum(counts.get(name, 0) for name in ends)


def main() -> None:
    prepare_process("cpu")
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        lines = [problems(flags, ranks) for flags, ranks in given["lines"]]
        import torch.distributed
        import torch.testing._internal.distributed.fake_pg as fake
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        store = fake.FakeStore()
        torch.distributed.init_process_group("fake", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        models = {name: parameters(flags) for name, flags in given["models"].items()}
        torch.distributed.destroy_process_group()
    print(json.dumps({"lines": lines, "models": models}))


if __name__ == "__main__":
    main()
