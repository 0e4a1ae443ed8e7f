"""What other engines make of exported folders: by hand, where their packages are installed.

    python -m tests.convert.engines make FOLDER          # here: tiny exports and their answers
    python tests/convert/engines.py transformers FOLDER  # in an environment of an engine
    python tests/convert/engines.py vllm FOLDER
    python tests/convert/engines.py llama.cpp FOLDER SOURCES SOURCES/gguf-py

Every export has its own folder, with the logits and the greedy tokens of the installed transformers
in answers.json. An engine's environment needs its package alone, not megasink: this file imports
nothing else. A line for each export: the largest difference of the log-probabilities, how many of
32 greedy tokens are the same, or why the engine did not load it. SOURCES are llama.cpp's,
with its convert_hf_to_gguf.py, as in the source distribution of llama-cpp-python.
"""

import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWERS = "answers.json"
PROMPT, NEW = 40, 32
Answer = tuple[list[list[float]], list[int]]


def make(folder: Path) -> None:
    """Export the models of `ENGINES`, each verified against Megatron, with their answers."""
    import torch

    from tests.convert.models import ENGINES
    from tests.distributed.layout import SINGLE
    from tests.distributed.pool import Pool

    workers = Pool(1)
    prompt = torch.randint(1, 101, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    try:
        only = os.environ.get("ENGINES_ONLY", "").split()
        for name in ENGINES:
            if only and name.removeprefix("engines-") not in only:
                continue
            root = folder / name.removeprefix("engines-")
            run = root.with_suffix(".run")
            workers.run("tests.convert.tasks:save_run", SINGLE, folder=str(run), name=name)
            options = {"run": str(run), "output": str(root), "target": ENGINES[name][0]}
            workers.run("tests.convert.tasks:verified_export", SINGLE, **options)
            logits, new = in_transformers(root, prompt)
            said = {"prompt": prompt, "log_probabilities": logits, "greedy": new}
            (root / ANSWERS).write_text(json.dumps(said))
    finally:
        workers.close()


def in_transformers(folder: Path, prompt: list[int]) -> Answer:
    """The answers of the installed transformers, in float32."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    options = {"attn_implementation": "eager"} if transformers.__version__ >= "4.36" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options)
    model = model.float().eval()
    with torch.no_grad():
        tokens = torch.tensor([prompt])
        rows = model(tokens).logits[0].log_softmax(-1).tolist()
        for _ in range(NEW):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return rows, tokens[0, PROMPT:].tolist()


def in_vllm(folder: Path, prompt: list[int]) -> Answer:
    """vLLM's answers, from its own model class, in float32."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    # It looks at a model's class in a process of its own, which imports everything once more.
    registry._run_in_subprocess = lambda function: function()
    model = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=2,
        max_logprobs=101,
        enable_prefix_caching=False,
        model_impl=os.environ.get("ENGINES_MODEL_IMPL", "vllm"),
    )
    options = SamplingParams(temperature=0.0, max_tokens=NEW, prompt_logprobs=101, detokenize=False)
    options.ignore_eos = True
    (made,) = model.generate([{"prompt_token_ids": prompt}], options, use_tqdm=False)
    rows = [[row[token].logprob for token in range(101)] for row in made.prompt_logprobs[1:]]
    return rows, list(made.outputs[0].token_ids)


def in_llama(folder: Path, prompt: list[int]) -> Answer:
    """llama.cpp's answers, from a GGUF file in float32."""
    import numpy
    from llama_cpp import Llama

    path = folder / "model.gguf"
    gguf(folder, path)
    model = Llama(
        str(path), n_ctx=96, logits_all=True, verbose=False, n_threads=1, flash_attn=False
    )
    model.eval(prompt)
    scores = numpy.array(model.scores[:PROMPT, :101], dtype=numpy.float64)
    scores -= scores.max(-1, keepdims=True)
    rows = (scores - numpy.log(numpy.exp(scores).sum(-1, keepdims=True))).tolist()
    new = []
    for _ in range(NEW):
        new.append(int(numpy.argmax(model.scores[model.n_tokens - 1, :101])))
        model.eval(new[-1:])
    path.unlink()
    return rows, new


def gguf(folder: Path, path: Path) -> None:
    """Run llama.cpp's converter on a folder, without looking for a tokenizer."""
    converter = importlib.import_module(PACKAGE["llama.cpp"][1])
    class_of = converter.get_model_class

    def set_vocab(model: Any) -> None:
        model.gguf_writer.add_tokenizer_model("none")
        key = converter.gguf.Keys.LLM.VOCAB_SIZE.format(arch=model.gguf_writer.arch)
        if not any(key in part for part in model.gguf_writer.kv_data):
            model.gguf_writer.add_vocab_size(101)

    def without_tokenizer(name: str, mmproj: bool = False) -> Any:
        kind = class_of(name, mmproj)
        kind.set_vocab = set_vocab
        return kind

    converter.get_model_class = without_tokenizer
    sys.argv = ["", str(folder), "--outfile", str(path), "--outtype", "f32", *_extra(folder)]
    converter.main()


def _extra(folder: Path) -> list[str]:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return ["--no-mtp"] if kind in ("qwen3_5_text", "qwen3_next") else []


PACKAGE = {
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "llama.cpp": ("llama_cpp", "convert_hf_to_gguf"),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
IN: dict[str, Callable[[Path, list[int]], Answer]] = {
    "transformers": in_transformers,
    "vllm": in_vllm,
    "llama.cpp": in_llama,
}


def compared(engine: str, folder: Path) -> dict[str, Any]:
    """What an engine makes of an export, against its answers."""
    known = json.loads((folder / ANSWERS).read_text())
    try:
        rows, new = IN[engine](folder, known["prompt"])
    except BaseException as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {str(error)[:400]}"}
    pairs = list(zip(rows, known["log_probabilities"][-PROMPT:], strict=False))
    different = max(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True))
    same = sum(a == b for a, b in zip(new, known["greedy"], strict=True))
    return {"different": different if math.isfinite(different) else None, "same": same}


def main() -> None:
    """Make the exports, or print what an engine makes of them, each in a process of its own."""
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        return make(folder)
    os.environ |= ENVIRONMENT
    sys.path[:0] = sys.argv[3:]
    for package in PACKAGE[command]:
        importlib.import_module(package)  # once, for all of them
    only = os.environ.get("ENGINES_ONLY", "").split()
    paths = [folder / name / ANSWERS for name in only] or sorted(folder.glob(f"*/{ANSWERS}"))
    for path in paths:
        result = path.with_name(f"{command}.json")
        log = path.with_name(f"{command}.log")
        if (child := os.fork()) == 0:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                result.write_text(json.dumps(compared(command, path.parent)))
                sys.stdout.flush()
            os._exit(0)
        result.unlink(missing_ok=True)
        os.waitpid(child, 0)
        said = result.read_text() if result.is_file() else "ended by a signal"
        print(path.parent.name, said, flush=True)
    return None


if __name__ == "__main__":
    main()
