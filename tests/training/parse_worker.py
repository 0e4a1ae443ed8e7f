"""Parses command lines as a rank does, in a process of its own (the platform is for a process).

Reads a JSON list of flag lists from standard input; writes a JSON list of
{"problems": [...]} or {"args": {...}}, and last {"help": what --help prints, "flags": all flags}.
"""

import contextlib
import io
import json
import sys
from typing import Any

from megasink.cpu.prepare_process import prepare_process
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
        from megasink.megatron.argument_parser import known_flags
        from megasink.training import parse_arguments
    answers = list[dict[str, Any]]()
    for argv in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                args, _ = parse_arguments.parse(argv)
            answers.append({"args": {name: getattr(args, name) for name in KEEP}})
        except ConfigError as error:
            answers.append({"problems": error.problems})
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parse_arguments.parse(["--help"])
    last = {"help": shown.getvalue(), "flags": list(known_flags())}
    json.dump([*answers, last], sys.stdout)


if __name__ == "__main__":
    main()
