"""Mistakes of a command line, of all commands: the table of test_mistakes.py.

name -> (command line, what the answer must hold). ``{0}`` is a folder as errors_page.py makes it.
"""

from tests.mistakes_with_models import MISTAKES_WITH_MODELS

DATA = "data {0}/text.txt --output {0}/new/text --tokenizer {0}/llama"
TRAIN = (
    "train --device cpu --run-dir {0}/new/run --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--train-iters 4 --lr 1e-3 "
    "--data-path {0}/tokens --tokenizer-model {0}/llama"
)
PLAN = TRAIN.replace("train", "plan", 1)

# Answered by Megatron's parser and the checks behind it; the others before a slow import.
PARSED = set(
    """
    train-nothing train-misspelt train-misspelt-required train-one-dash train-long-dash train-equals
    train-stray-word train-no-value train-type train-float train-nan train-infinite train-negative
    train-zero-heads train-choice-of-megatron train-heads train-groups train-batch train-ranks
    train-warm-up train-precision train-length train-yaml train-wandb train-layers
    train-opposite train-another-model train-assertion
    """.split()
)
MISTAKES = {
    # The command itself.
    "misspelt-command": ("trian --lr 1", "the command 'trian' is unknown", "did you mean train?"),
    "underscores-in-command": ("convert_to_hf a b", "did you mean convert-to-hf?"),
    "flags-before-command": ("--run-dir x train", "unknown: --run-dir"),
    # train
    "train-nothing": (
        "train --device cpu --run-dir {0}/new/run",
        "missing: --num-layers, --hidden-size, --num-attention-heads, --seq-length, "
        "--max-position-embeddings, --micro-batch-size, --train-iters or --train-samples, --lr",
        "no training data: give --data-path",
        "no tokenizer: give --tokenizer-model",
    ),
    "train-recipe": (
        "train --recipe p0-6b",
        "the recipe 'p0-6b' is unknown: choose p0-0.6b",
    ),
    "recipes-unknown": ("recipes p1-48l", "the recipe 'p1-48l' is unknown: choose p0-0.6b"),
    "recipes-no-run": ("recipes {0}", "{0} is not a run: it has no config.toml"),
    "train-underscore": (
        TRAIN + " --attention_variant sink",
        "unknown: --attention_variant sink: did you mean --attention-variant?",
    ),
    "train-misspelt": (TRAIN + " --num-layer 3", "did you mean --num-layers?"),
    "train-misspelt-required": (
        TRAIN.replace("--hidden-size", "--hiden-size"),
        "megasink: error: unknown: --hiden-size 64: did you mean --hidden-size?",  # and no more
    ),
    "train-one-dash": (TRAIN + " -lr 1e-3", "unknown: -lr 1e-3: did you mean --lr?"),
    "train-long-dash": (TRAIN + " –bf16", "unknown: –bf16: did you mean --bf16?"),
    "train-equals": (TRAIN + " --trainiters=5", "did you mean --train-iters?"),
    "train-opposite": (TRAIN + " --no-swiglu", "unknown: --no-swiglu (megasink train --help-all"),
    "train-another-model": (TRAIN + " --use-mpi", "unknown: --use-mpi (megasink train --help-all"),
    "train-assertion": (
        TRAIN + " --train-samples 8",
        "Megatron refuses this configuration: expected iteration-based training (arguments.py:",
    ),
    "train-own-misspelt": (
        TRAIN + " --head-balance-coef 1",
        "unknown: --head-balance-coef 1: did you mean --head-balance-coeff?",
    ),
    "train-stray-word": (TRAIN + " 128", "unknown: 128"),
    "train-no-value": (TRAIN + " --save-interval", "--save-interval needs a value"),
    "train-type": (TRAIN + " --num-layers two", "--num-layers 'two': use a whole number"),
    "train-float": (TRAIN + " --train-iters 1e3", "--train-iters '1e3': use a whole number"),
    "train-nan": (TRAIN + " --lr nan", "--lr nan: give a finite number"),
    "train-infinite": (TRAIN + " --clip-grad inf", "--clip-grad inf: give a finite number"),
    "train-negative": (TRAIN + " --lr -1e-3", "--lr -0.001 is negative"),
    "train-zero-heads": (TRAIN + " --num-attention-heads 0", "--num-attention-heads 0: use 1 or"),
    "train-choice": (
        TRAIN + " --attention-variant sinks",
        "--attention-variant 'sinks' is unknown: choose vanilla, sink",
        "did you mean sink?",
    ),
    "train-choice-of-megatron": (
        TRAIN + " --normalization rmsnorm",
        "--normalization 'rmsnorm' is unknown: choose LayerNorm, RMSNorm",
    ),
    "train-data": (
        TRAIN + " --data-path {0}/token",
        "--data-path {0}/token: {0}/token.bin and {0}/token.idx not found",
    ),
    "train-tokenizer": (TRAIN + " --tokenizer-model {0}/lama", "{0}/lama: no such folder"),
    "train-heads": (
        TRAIN + " --num-attention-heads 5",
        "--hidden-size 64 is not divisible by --num-attention-heads 5",
    ),
    "train-groups": (
        TRAIN + " --group-query-attention --num-query-groups 3",
        "--num-attention-heads 4 is not divisible by --num-query-groups 3",
    ),
    "train-batch": (
        TRAIN + " --global-batch-size 3",
        "--global-batch-size 3 is not divisible by --micro-batch-size 2",
    ),
    "train-ranks": (
        TRAIN + " --tensor-model-parallel-size 2 --ranks 3",
        "3 ranks are not divisible by --tensor-model-parallel-size 2",
    ),
    "train-no-ranks": (TRAIN + " --ranks 0", "--ranks 0: use 1 or more"),
    "train-wordy-ranks": (TRAIN + " --ranks two", "--ranks 'two': use a whole number"),
    "train-warm-up": (
        TRAIN + " --lr-warmup-iters 500",
        "--lr-warmup-iters 500 is not less than the length of the schedule, 4",
    ),
    "train-precision": (
        TRAIN + " --bf16 --fp16",
        "choose either --fp16 or --bf16",
    ),
    "train-length": (
        TRAIN + " --seq-length 128",
        "--seq-length 128 is longer than --max-position-embeddings 64",
    ),
    "train-yaml": (TRAIN + " --yaml-cfg {0}/nothing.yaml", "--yaml-cfg {0}/nothing.yaml: give fl"),
    "train-wandb": (
        TRAIN + " --wandb-project sinks --wandb-exp-name a",
        "wandb is not installed: pip install wandb",
    ),
    "train-layers": (
        TRAIN + " --pipeline-model-parallel-size 3",
        "--num-layers 2 is not divisible by --pipeline-model-parallel-size 3",
    ),
    # plan
    "plan-several": (
        TRAIN.replace("train", "plan", 1).replace("--device cpu ", "")
        + " --attention-variant sinks --head-balance-coeff -1",
        "--attention-variant 'sinks' is unknown",
        "--head-balance-coeff -1.0 is negative",
    ),
    "plan-cpu": (PLAN, "--device: a plan is for the GPUs of --gpu; drop the flag"),
    "plan-device": ("plan --gpu h10", "--gpu 'h10' is unknown: choose a100-40gb, a100, h100"),
    "plan-utilization": ("plan --utilization 40", "--utilization 40.0: use more than 0, and at m"),
    "train-resume-nothing": (TRAIN + " --resume", "--resume: {0}/new/run does not hold a run"),
    "train-into-a-file": (TRAIN + " --run-dir {0}/text.txt", "--run-dir {0}/text.txt is a file"),
    "train-into-other-things": (
        TRAIN + " --run-dir {0}/notes",
        "holds other files and is not a run",
    ),
    "train-into-a-model": (
        TRAIN + " --run-dir {0}/llama",
        "--run-dir {0}/llama: its config.json does not describe a run: choose another folder",
    ),
    "train-over-a-run": (TRAIN + " --run-dir {0}/run", "--run-dir {0}/run already holds a run"),
    "a-command-of-no-release": (
        "grit {0}/grid.toml",
        "the command 'grit' is unknown: choose ",
    ),
    "analyze-a-folder-of-runs": (
        "analyze {0} --data {0}/text.txt --output {0}/new/page",
        "{0} is a folder of runs: give one, {0}/run",
    ),
    "generate-from-a-folder-of-runs": (
        "generate {0} --prompt text",
        "{0} is a folder of runs: give one, {0}/run",
    ),
    "resume-a-folder-of-runs": (
        TRAIN.replace("{0}/new/run", "{0}") + " --resume",
        "--resume: {0} is a folder of runs: give one, {0}/run",
    ),
    "checkpoints-of-a-folder-of-runs": (
        "checkpoints {0}",
        "{0} is a folder of runs: give one, {0}/run",
    ),
    "compare-a-folder-of-runs": (
        "compare {0}",
        "{0} is a folder of runs: give one, {0}/run",
    ),
    "export-a-folder-of-runs": (
        "convert-to-hf {0} --output {0}/new/hf",
        "{0} is a folder of runs: give one, {0}/run",
    ),
    # checkpoints
    "checkpoints-nothing": (
        "checkpoints {0}/new/run",
        "{0}/new/run does not exist: give a run folder",
    ),
    # data
    "data-partition": (
        DATA + " --partition 9/8",
        "--partition: '9/8' is not a part: use its number and the number of parts, such as 1/8",
    ),
    "data-partition-of-one-file": (
        DATA + " --partition 2/8",
        "--partition 2/8: only 1 of the 8 parts would have data",
    ),
    "data-validation": (DATA + " --validation 5", "--validation 5: use more than 0"),
    "data-validation-nan": (DATA + " --validation nan", "--validation nan: use more than 0"),
    "data-merge-nothing": ("data --merge {0}/new/text", "{0}/new/text: found no part: make"),
    "data-nothing": ("data", "missing: INPUT, --output"),
    "data-no-tokenizer": (
        "data {0}/text.txt --output {0}/new/text",
        "missing: --tokenizer or --train-tokenizer",
    ),
    "data-both-tokenizers": (
        DATA + " --train-tokenizer 500",
        "--train-tokenizer and --tokenizer: choose one",
    ),
    "data-misspelt": (
        "data {0}/text.txt --ouput {0}/new/text --tokenizer {0}/llama",
        "unknown: --ouput: did you mean --output?",
    ),
    "data-no-file": (DATA.replace("text.txt", "txt.text"), "{0}/txt.text"),
    "data-small-vocabulary": (
        "data {0}/text.txt --output {0}/new/text --train-tokenizer 10",
        "--train-tokenizer 10 is too small",
    ),
    "data-workers": (DATA + " --workers 0", "--workers 0: use 1 or more"),
    "data-choice": (
        DATA + " --split-documents maybe",
        "--split-documents 'maybe' is unknown: choose auto, paragraphs, never",
    ),
    "data-under-a-file": (
        DATA.replace("new/text", "text.txt/new"),
        "{0}/text.txt/new cannot be created: {0}/text.txt is a file",
    ),
    "data-is-there": (DATA.replace("new/text", "tokens"), "{0}/tokens"),
    "data-no-tokenizer-there": (DATA.replace("llama", "lama"), "{0}/lama: no such folder"),
    # generate
    "finetune-no-model": (
        "finetune {0}/lama --data {0}/text.txt --output {0}/new/out --epochs 0",
        "{0}/lama: no such folder; nothing is downloaded",
        "--epochs 0",
    ),
    "finetune-run": (
        "finetune {0}/run --data {0}/text.txt --output {0}/new/out",
        "{0}/run is a megasink run: megasink convert-to-hf exports it",
    ),
    "generate-nothing": ("generate", "missing: RUN, --prompt"),
    "generate-no-run": (
        "generate {0}/runs --prompt a",
        "{0}/runs does not exist: give a run folder",
    ),
    "generate-iteration": (
        "generate {0}/run --prompt a --iteration 7",
        "no checkpoint of iteration 7; it has 4",
    ),
    "generate-temperature": ("generate {0}/run --prompt a --temperature -1", "--temperature -1.0"),
    "generate-top-p": ("generate {0}/run --prompt a --top-p 1.5", "--top-p 1.5"),
    "generate-nan": ("generate {0}/run --prompt a --temperature nan", "--temperature nan"),
    "generate-tokens": (
        "generate {0}/run --prompt '' --max-new-tokens 0 --top-k -2",
        "--prompt is empty",
        "--max-new-tokens 0: use 1 or more",
        "--top-k -2",
    ),
    "generate-unfinished": (
        "generate {0}/notes --prompt a",
        "{0}/notes has no finished checkpoint",
    ),
    "generate-hugging-face": (
        "generate {0}/llama --prompt a",
        "{0}/llama is a Hugging Face folder, not a run: import it with megasink convert-from-hf",
    ),
    "generate-another-checkpoint": (
        "generate {0}/run/checkpoints/iter_0000004 --prompt a --iteration 7",
        "not the checkpoint of",
    ),
    "generate-tokenizer": ("generate {0}/run --prompt a --tokenizer {0}/lama", "{0}/lama"),
    "generate-misspelt": (
        "generate {0}/run --prompt a --max-tokens 5",
        "unknown: --max-tokens 5: did you mean --max-new-tokens?",
    ),
    **MISTAKES_WITH_MODELS,
}
