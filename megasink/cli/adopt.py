"""``megasink adopt``: make a run of a checkpoint of Megatron-LM or Megatron-Bridge."""

from collections.abc import Sequence
from pathlib import Path

from megasink.checkpoints.megatron_lm_arguments import foreign_checkpoints
from megasink.console.printable import say, say_next
from megasink.cpu.prepare_process import prepare_quietly
from megasink.errors import UserError
from megasink.files.output_folder import refuse_contents
from megasink.options.command_parser import CommandParser
from megasink.plugins import add_flag


def main(argv: Sequence[str] | None = None) -> int:
    """Turn a Megatron-LM or Megatron-Bridge checkpoint into a run, which every command takes.

    The run links to the files of the checkpoint, which must stay where they are; the run may move.
    No code in the checkpoint runs.
    """
    parser = CommandParser(prog="megasink adopt", description=main.__doc__)
    text = "Megatron's --save folder (torch_dist), or the folder of one iteration"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=text)
    text = "run folder to write; must be empty or missing"
    parser.add_argument("run", metavar="RUN", type=Path, help=text)
    parser.add_argument("--iteration", type=int, help="adopt only this checkpoint; default: all")
    text = "Hugging Face folder to use instead of the checkpoint's tokenizer"
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=text)
    add_flag(parser)
    args = parser.first_screen("megasink adopt checkpoints/mine runs/mine").parse_args(argv)
    if not args.checkpoint.is_dir():
        raise UserError(f"{args.checkpoint} does not exist: give a checkpoint folder of Megatron")
    refuse_contents(args.run)
    if args.tokenizer is not None and not args.tokenizer.is_dir():
        raise UserError(f"--tokenizer {args.tokenizer} does not exist: give a folder")
    steps = foreign_checkpoints(args.checkpoint, args.iteration)
    prepare_quietly(cpu=True)
    from megasink.checkpoints.load import single_process
    from megasink.convert.adopt_checkpoint import adopt

    with single_process():
        resumes, lines = adopt(steps, args.run, args.tokenizer)
    for line in lines:
        say(line)
    say_next("analyze its heads", "analyze", args.run, "--data", "TEXTS", "--output", "look")
    if resumes:
        say_next("continue training", "train", "--run-dir", args.run, "--resume")
    else:
        flags = f"$(cat {args.run}/flags.txt) --load {args.run}/checkpoints --finetune"
        say(f"fine-tune it with: megasink train {flags} --run-dir NEW")
    return 0
