"""What other engines make of exported folders: by hand, where their packages are installed.

    python -m tests.convert.engines make FOLDER          # here: tiny exports and their answers
    python tests/convert/engines.py transformers FOLDER  # in an environment of an engine
    python tests/convert/engines.py vllm FOLDER
    python tests/convert/engines.py llama.cpp FOLDER CONVERTER

Every export has its own folder, with the logits and the greedy tokens of the installed transformers
in answers.json. An engine's environment needs its package alone, not megasink: this file imports
nothing else. A line for each export: the largest difference of the log-probabilities, how many of
32 greedy tokens are the same, or why the engine did not load it. CONVERTER is llama.cpp's
convert_hf_to_gguf.py, which the source distribution of llama-cpp-python has.
"""

import importlib
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
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
    convert = [sys.executable, __file__, "gguf", str(folder), str(path), sys.argv[3]]
    done = subprocess.run(convert, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
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


def gguf(folder: str, path: str, converter: str) -> None:
    """Run llama.cpp's converter on a folder without a tokenizer."""
    sys.path.insert(0, str(Path(converter).parent))
    sys.argv = [converter, folder, "--outfile", path, "--outtype", "f32", *_extra(folder)]
    module = importlib.import_module("convert_hf_to_gguf")
    for base in set(_all(module.ModelBase)):
        if "set_vocab" in vars(base):
            base.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
    module.main()


def _all(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _all(sub)


def _extra(folder: str) -> list[str]:
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    return ["--no-mtp"] if kind in ("qwen3_5_text", "qwen3_next") else []


PACKAGE = {"transformers": "transformers", "vllm": "vllm", "llama.cpp": "llama_cpp"}
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
    if command == "gguf":
        return gguf(*sys.argv[2:5])
    os.environ |= ENVIRONMENT
    importlib.import_module(PACKAGE[command])  # once, for all of them
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
