"""``megasink finetune``: adapt a Hugging Face model on conversations, and export it again."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from megasink.analysis.options import model_problem
from megasink.checkpoints.find import is_run
from megasink.cli import hub
from megasink.errors import ConfigError, UserError
from megasink.files.output_folder import foreign_contents
from megasink.finetune.options import FinetuneOptions, processes
from megasink.options.command_parser import CommandParser
from megasink.options.dataclass_flags import add_fields
from megasink.plugins import add_flag

_PACKAGES = ("accelerate", "datasets", "peft", "trl")
_GRACE_SECONDS = 60.0
_FLAGS = [field.name for field in fields(FinetuneOptions) if field.name != "model"]


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune a model on conversations with LoRA and the head-balance loss of Eq. 8.

    Measures the importance of the model's heads, chooses the shared heads (m of Eq. 8), trains with
    TRL's SFTTrainer on the assistant's turns, exports for transformers, and measures again. A
    repeated command continues from the last checkpoint. `torchrun --nproc-per-node N -m megasink
    finetune ...` or `accelerate launch` starts several processes (data parallelism).
    """
    with _reported_once():
        args = _parser(main.__doc__).parse_args(sys.argv[1:] if argv is None else list(argv))
        options = _options(args)
        if missing := [name for name in _PACKAGES if not find_spec(name)]:
            raise UserError(
                f"megasink finetune needs {', '.join(missing)}: pip install 'megasink[finetune]'"
            )
        hub.stay_offline()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice
        from megasink.finetune.finetune_job import fine_tune

        fine_tune(options, args.output, args.overwrite, args.base)
    return 0


@contextlib.contextmanager
def _reported_once() -> Iterator[None]:
    """Report an error once, on rank 0; leave the group of processes."""
    try:
        yield
    except Exception:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_GRACE_SECONDS)
        raise
    finally:
        torch = sys.modules.get("torch")
        if processes() > 1 and torch and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _parser(description: str | None) -> CommandParser:
    parser = CommandParser(prog="megasink finetune", description=description)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a Hugging Face folder with safetensors")
    add("--output", type=Path, required=True, help="output folder")
    add("--overwrite", action="store_true", help="replace the contents of --output and start again")
    add_fields(parser, FinetuneOptions, *_FLAGS)
    add_flag(parser)
    hub.add_allow_download(parser)
    first = "data output full lora-rank adapter head-balance-coeff shared-heads epochs seq-length"
    first += " lr micro-batch-size global-batch-size bf16"
    return parser.first_screen(
        "megasink finetune MODEL --data chats.jsonl --output out --bf16",
        *(f"--{name}" for name in first.split()),
    )


def _options(args: argparse.Namespace) -> FinetuneOptions:
    """Return the options, or raise all problems that are known before anything runs."""
    args.base, model = args.model, hub.fetched(args)
    given = {name: getattr(args, name) for name in _FLAGS} | {"data": tuple(args.data)}
    found = [model_problem(model, "--allow-download")]
    if is_run(model):
        found.append(f"{model} is a megasink run: export it first with megasink convert-to-hf")
    if not args.overwrite:
        found.append(foreign_contents(args.output))
    problems = [problem for problem in found if problem]
    try:
        options = FinetuneOptions(model=model, **given)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options
