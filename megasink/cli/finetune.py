"""``megasink finetune``: adapt a Hugging Face model on conversations, and export it again."""

import sys
from collections.abc import Sequence

from megasink.errors import ConfigError
from megasink.finetune.settings import read, remember
from megasink.output_folder import exclusive
from megasink.training import early


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune a model on conversations with LoRA and the head-balance loss of Eq. 8.

    Tokenizes with the model's chat template, measures the importance of its heads, chooses which of
    them to share (m of Eq. 8), trains, exports for transformers, and measures again. Each step is a
    command of megasink, shown as it runs; a repeated command goes on after the last finished step.
    Further flags go to `megasink train`.
    """
    words = early.expanded(sys.argv[1:] if argv is None else argv)
    args, further = read(words, main.__doc__)
    if problems := early.read(["--run-dir", str(args.output / "run"), *further]).flag_problems:
        raise ConfigError(problems)  # not only when the training starts
    remember(args, further, args.output / "finetune.json")
    from rich.console import Console

    from megasink.finetune.recipe import recipe, summary

    console = Console(highlight=False)
    with exclusive(args.output):
        for step in recipe(args, further, console):
            step.run(console)
    for line in summary(args):
        console.print(line, soft_wrap=True, markup=False)
    return 0
