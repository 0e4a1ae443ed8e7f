"""Commands and flags that went, and what serves instead: one record for every answer to them."""

_SHARE = (
    "no paper has it: a loop of your own gives begin(step, share=...) of the HeadBalance a share "
    "of the coefficient"
)
_SYNC = "copy the run folder with aws s3 sync or rclone (docs/object-stores.md)"
_RETAIN = (
    "train with --save-retain-interval STEPS, or delete the folders of those that you do not need"
)
_PLAIN = "the flags of finetune are given on the command line"
_TRAINER = (
    "TRL's SFTTrainer with HeadBalanceCallback takes any setting of peft (docs/finetuning.md)"
)
_BRIDGE = (
    "finetune divides data over processes, not the model: use Megatron-Bridge with our spec "
    "(docs/finetuning.md)"
)
FINETUNE = "megasink finetune (docs/finetuning.md)"
_PEFT = f"{FINETUNE}, or under Megatron the PEFT of Megatron-Bridge with megasink's layer spec"
_MERGED = "merge the adapter first: peft's merge_and_unload (docs/finetuning.md)"
_TRACE = (
    "megasink analyze RUN --checkpoints --data FILES measures the run's checkpoints "
    "(docs/instruments.md)"
)
GONE = {
    "megasink grid": "the grid is `python -m examples.replicate.grid` in a checkout; Hydra or "
    "submitit for sweeps of your own",
    "megasink merge-data": "megasink data --merge PREFIX joins the parts of a data set",
    "megasink plot": "megasink compare RUN draws one run, too",
    "megasink trace": _TRACE,
    "--analyze-interval": _TRACE,
    "--analyze-samples": _TRACE,
    **dict.fromkeys(
        ("--lora-rank", "--lora-alpha", "--lora-dropout", "--lora-targets", "--lora-train"), _PEFT
    ),
    "--head-balance-warmup-iters": _SHARE,
    "--head-balance-decay-iters": _SHARE,
    "megasink convert-to-hf --adapter": FINETUNE,
    "megasink convert-from-hf --base": _MERGED,
    "megasink data --chat": FINETUNE,
    "megasink data --seq-length": "text is cut when it is trained on, at any length",
    "--config": "--recipe takes names, files and run folders (docs/recipes.md)",
    "--checkpoint-store": _SYNC,
    "--fetch": _SYNC,
    "--prune": _RETAIN,
    "--keep-every": _RETAIN,
    "--full-help": "--help-all lists every flag",
    "--preflight": "--gpu-sniff-test-interval STEPS times GPUs and links (docs/survival.md)",
    "megasink doctor --patches": "megasink/upstream/README.md has them; the self-test their lines",
    "megasink data --on-invalid-utf8": "documents that are not UTF-8 are skipped and named",
    "megasink plan --what-if": "a plan with the flag in question says what it takes (docs/plan.md)",
    "megasink evaluate --json": "evaluation.json in --output has the results",
    "megasink recipes --json": "megasink recipes NAME prints TOML, which Python's tomllib reads",
    "megasink plan --output": "--json has every number of the tables",
    "megasink finetune --ranks": "torchrun --nproc-per-node N -m megasink finetune starts several "
    "processes",
    "megasink finetune --cpu": "it runs on a CPU where CUDA sees no GPU (CUDA_VISIBLE_DEVICES=)",
    "megasink finetune --config": _PLAIN,
    "megasink finetune --recipe": _PLAIN,
    "megasink finetune --lora-dropout": _TRAINER,
    "megasink finetune --lora-targets": _TRAINER,
    "megasink finetune --tensor-model-parallel-size": _BRIDGE,
    "megasink finetune --pipeline-model-parallel-size": _BRIDGE,
    "megasink finetune --context-parallel-size": _BRIDGE,
}
"""Command, or flag, or a flag of one command -> what serves instead."""
