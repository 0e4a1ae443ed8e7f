"""Task for a worker: a run exported, analyzed and continued, beside plain transformers."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

from tests.training.generate_tasks import megasink

PROMPT, NEW = "The first token of a text", 8


def used(run: str, folder: str) -> dict[str, Any]:
    """Export a run to folder/hf; analyses of both in folder/of-run and folder/of-hf.

    Returns:
        "said" by the export; "target"; "class": of transformers; "generated", "greedy": the text
        that `megasink generate` continues, and the same of transformers.
    """
    import transformers

    from megasink.convert.megasink_model import model_class

    hf, root = Path(folder) / "hf", Path(folder)
    corpus = root / "text.txt"
    corpus.write_text("A head that has nothing to add looks at the first token of its text. " * 9)
    look = "--seq-length 32 --max-samples 2 --device cpu --data".split()
    commands = [
        ["convert-to-hf", run, "--output", str(hf), "--device", "cpu"],
        ["analyze", run, *look, str(corpus), "--output", str(root / "of-run")],
        ["analyze", str(hf), *look, str(corpus), "--output", str(root / "of-hf")],
        ["generate", run, "--device", "cpu", "--temperature", "0", "--max-new-tokens", str(NEW)],
    ]
    commands[-1] += ["--prompt", PROMPT]
    with mock.patch(
        "megasink.analysis.pages.analysis_page.figures", return_value=[]
    ):  # they take longest
        answers = megasink(commands)
    assert [code for code, _, _ in answers] == [0] * len(commands), answers
    config = json.loads((hf / "config.json").read_text())
    model = model_class(hf).from_pretrained(hf, dtype="auto", attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    tokens = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    greedy = model.generate(**tokens, max_new_tokens=NEW, do_sample=False)
    return {
        "said": answers[0][1],
        "target": config["model_type"],
        "class": config["architectures"][0],
        "generated": answers[-1][1].strip(),
        "greedy": tokenizer.decode(greedy[0], skip_special_tokens=True).strip(),
    }
