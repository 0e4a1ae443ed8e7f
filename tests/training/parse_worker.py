"""Parses command lines as a rank does, in a process of its own (the platform is for a process).

Reads a JSON list of flag lists from standard input; writes a JSON list of
{"problems": [...], "late": what a rank finds whose launcher has checked the line} or
{"args": {...}}, and last the table of Megatron's flags and {"help": what --help prints}.
"""

import contextlib
import io
import json
import os
import sys
from argparse import Namespace

from megasink.cpu.process import prepare_process
from megasink.errors import ConfigError

KEEP = (
    "distributed_backend transformer_impl attention_dropout hidden_dropout "
    "padded_vocab_size dist_ckpt_optim_fully_reshardable ckpt_format "
    "use_cpu_initialization softmax_offset_init attention_variant attention_variant_layers "
    "head_balance_coeff train_iters sink_token_id ffn_hidden_size exit_signal_handler"
).split()


def main() -> None:
    prepare_process()
    with contextlib.redirect_stdout(sys.stderr):
        from megasink.training import arguments, flag_table

        # A default of Megatron's is the world size.
        ranks = os.environ.pop("WORLD_SIZE")
        table = flag_table.make_table()
        os.environ["WORLD_SIZE"] = ranks
    answers, late = [], list[str]()
    problems = arguments.checks.problems

    def find(args: Namespace, *, checked: bool) -> list[str]:
        late[:] = problems(args, checked=True)
        return problems(args, checked=checked)

    arguments.checks.problems = find  # type: ignore[assignment]
    for argv in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                args, _ = arguments.parse(argv)
            answers.append({"args": {name: getattr(args, name) for name in KEEP}})
        except ConfigError as error:
            answers.append({"problems": error.problems, "late": [*late]})
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        arguments.parse(["--help"])
    json.dump([*answers, table, {"help": shown.getvalue()}], sys.stdout)


if __name__ == "__main__":
    main()
