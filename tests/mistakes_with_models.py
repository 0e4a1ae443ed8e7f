"""Mistakes of the commands that look at models, compare runs and convert: see mistakes.py."""

ABLATE = "ablate {0}/llama --data {0}/text.txt --output {0}/new/out"
ANALYZE = "analyze {0}/llama --data {0}/text.txt --output {0}/new/out --device cpu --seq-length 24"

MISTAKES_WITH_MODELS = {
    # analyze, sweep, report
    "analyze-no-data": (
        "analyze {0}/llama --output {0}/new/out",
        "no --data: pass text files or folders",
    ),
    "analyze-no-model": (
        ANALYZE.replace("llama", "lama"),
        "{0}/lama: no such folder; nothing is downloaded",
    ),
    "analyze-device": (ANALYZE + " --device tpu", "--device tpu"),
    "analyze-no-cuda": (ANALYZE + " --device cuda:3", "--device cuda:3"),
    "analyze-samples": (ANALYZE + " --max-samples 0", "--max-samples 0: use 1 or more"),
    "analyze-dtype": (
        ANALYZE + " --dtype float8",
        "--dtype 'float8' is unknown: choose auto, float32, bfloat16",
    ),
    "analyze-head": (ANALYZE + " --maps 3:5", "3:5"),
    "analyze-no-head": (ANALYZE + " --maps 99.0", "--maps: head 99.0: the model has layers 0 to 1"),
    "analyze-tokenizer": (
        ANALYZE + " --tokenizer {0}/notes",
        "--tokenizer {0}/notes has no tokenizer files, such as tokenizer.json",
    ),
    "analyze-misspelt": (ANALYZE + " --seq-lenght 64", "did you mean --seq-length?"),
    "analyze-random-lengths": (
        ANALYZE.replace("--seq-length 24", "--random-lengths 24 10"),
        "--random-lengths 24 10: give the smaller number first",
    ),
    "analyze-random-and-fixed": (
        ANALYZE + " --random-lengths 10 20",
        "--random-lengths 10 20 and --seq-length 24: choose one",
    ),
    "analyze-random-too-long": (
        ANALYZE.replace("--seq-length 24", "--random-lengths 10 99999"),
        "--random-lengths 10 99999 is longer than the",
    ),
    "analyze-replaced": (
        ANALYZE + " --replace-tokens-at 0 zero",
        "--replace-tokens-at zero: use positions from 0 on, or only none",
    ),
    "analyze-replaced-by": (
        ANALYZE + " --replace-tokens-at 0 --replace-tokens-with some",
        "--replace-tokens-with some: use random, or the id of a token",
    ),
    "analyze-data": (ANALYZE.replace("text.txt", "txt.text"), "{0}/txt.text"),
    "analyze-into-other-things": (
        ANALYZE.replace("new/out", "notes"),
        "--output {0}/notes holds thesis.txt, which is not a result of megasink",
    ),
    "sweep-lengths": (
        "sweep {0}/llama --data {0}/text.txt --output {0}/new/out --lengths 1",
        "--lengths 1: use 2 or more",
    ),
    "sweep-positions": (
        "sweep {0}/llama --data {0}/text.txt --output {0}/new/out --lengths 65",
        "--lengths 65: the model has 64 positions",
    ),
    "sweep-bos": (
        "sweep {0}/llama --data {0}/text.txt --output {0}/new/out --bos with",
        "--bos 'with' is unknown: choose auto",
    ),
    "ablate-score": (
        "ablate {0}/llama --data {0}/text.txt --output {0}/new/out --score ahon_nl",
        "ahon_nl",
        "ahon_ln",
    ),
    "ablate-share": (
        "ablate {0}/llama --data {0}/text.txt --output {0}/new/out --zeroed 5 120",
        "--zeroed 120",
    ),
    "ablate-head": (ABLATE + " --heads 99.0", "--heads: head 99.0: the model has layers 0 to 1"),
    "ablate-heads": (ABLATE + " --heads 3,5", "--heads 3,5: write a head as LAYER.HEAD"),
    "ablate-layer": (ABLATE + " --layer 77", "--layer 77: the layers are 0 to 1"),
    "ablate-file-of-heads": (
        ABLATE + " --heads {0}/heads.csv",
        "--heads {0}/heads.csv cannot be read (No such file",
    ),
    "ablate-interventions": (ABLATE + " --interventions {0}/text.txt", "text.txt is not JSON"),
    "ablate-calibration": (
        ABLATE + " --calibration {0}/llama",
        "--calibration: {0}/llama does not hold an analysis: it has no results.json",
    ),
    "ablate-run": (
        ABLATE.replace("llama", "run", 1),
        "run/config.json is not from a megasink run: it lacks ffn_hidden_size, padded_vocab_size",
    ),
    "ablate-task": (
        "ablate {0}/llama --output {0}/new/out --tasks nothing",
        "--tasks nothing: no such task, group, tag or suite",
    ),
    "ablate-no-text": ("ablate {0}/llama --output {0}/new/out", "--data"),
    "evaluate-no-tasks": ("evaluate {0}/llama --output {0}/new/out", "missing: --tasks"),
    "evaluate-kind": (
        "evaluate {0}/llama --output {0}/new/out --tasks piqa --interventions {0}/kinds.json",
        "{0}/kinds.json, entry 0: kind 'zero-head' is unknown: choose drain-first-value",
    ),
    "evaluate-value": (
        "evaluate {0}/llama --output {0}/new/out --tasks piqa --interventions {0}/value.json",
        "{0}/value.json, entry 0 (steer-gates): scale -1: a number from 0 on",
    ),
    "evaluate-limit": (
        "evaluate {0}/llama --output {0}/new/out --device cpu --tasks docstrings_choice --limit 0",
        "--limit 0: use 1 or more",
    ),
    "checkpoints-no-run": (
        f"{ANALYZE} --checkpoints",
        "--checkpoints needs a run, and {0}/llama is not one",
    ),
    "report-no-analysis": ("report {0}/llama --output {0}/new/page", "{0}/llama"),
    "report-no-output": ("report {0}/llama", "missing: --output"),
    # compare, doctor, demo
    "compare-no-run": ("compare {0}/runs", "{0}/runs"),
    "compare-into-nowhere": (
        "compare {0}/run --output {0}/text.txt/x.png",
        "{0}/text.txt is a file",
    ),
    "compare-one-twice": ("compare {0}/run {0}/run", "a run is given twice"),
    "compare-into-a-text": (
        "compare {0}/run --output {0}/text.txt",
        "--output {0}/text.txt: the picture is a PNG: name it text.txt.png",
    ),
    "compare-axis": ("compare {0}/run --x time", "--x 'time' is unknown: choose step"),
    "compare-smoothing": ("compare {0}/run {0}/run --smoothing 1", "--smoothing 1.0"),
    "compare-one-by-tokens": (
        "compare {0}/run --x tokens",
        "--x and --smoothing need several",
    ),
    "doctor-type": ("doctor --head-dim wide", "--head-dim 'wide': use a whole number"),
    "doctor-negative": ("doctor --head-dim -4", "--head-dim -4"),
    "demo-file": (
        "demo --output {0}/text.txt",
        "{0}/text.txt cannot be created: {0}/text.txt is a file",
    ),
    "demo-steps": ("demo --output {0}/new/demo --train-iters 0", "--train-iters 0"),
    "demo-misspelt": ("demo --folder {0}/new/demo", "unknown: --folder"),
    # convert
    "to-hf-no-run": ("convert-to-hf {0}/runs --output {0}/new/hf", "{0}/runs"),
    "to-hf-target": ("convert-to-hf {0}/run --output {0}/new/hf --target lama", "lama"),
    "to-hf-size": ("convert-to-hf {0}/run --output {0}/new/hf --shard-size big", "big"),
    "to-hf-run": (
        "convert-to-hf {0}/run --output {0}/new/hf",
        "run/config.json is not from a megasink run: it lacks ffn_hidden_size, padded_vocab_size",
    ),
    "to-hf-iteration": ("convert-to-hf {0}/run --output {0}/new/hf --iteration 7", "7"),
    "from-hf-no-folder": ("convert-from-hf {0}/lama --output {0}/new/run", "{0}/lama"),
    "from-hf-variant": (
        "convert-from-hf {0}/llama --output {0}/new/run --attention-variant gate",
        "--attention-variant 'gate' is unknown: choose sink, gated (did you mean gated?)",
    ),
    "from-hf-weight": (
        "convert-from-hf {0}/llama --output {0}/new/run --attention-variant sink --sink-weight 2",
        "--sink-weight 2",
    ),
    "from-hf-granularity": (
        "convert-from-hf {0}/llama --output {0}/new/run --gate-granularity headwise "
        "--attention-variant sink",
        "--gate-granularity has no effect with --attention-variant sink",
    ),
    "from-hf-swapped": ("convert-from-hf {0}/run --output {0}/new/run", "{0}/run"),
    "from-hf-one-folder": ("convert-from-hf {0}/llama", "missing: --output"),
}
