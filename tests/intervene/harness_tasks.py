"""Tasks of lm-eval for the tests, in a folder."""

import json
from pathlib import Path
from typing import Any

# Of several lengths; some share a context, or all but their last token. The last ones have one
# length with the tests' tokenizers, in which <|unk|> is 0.
CHOICES = [
    {"context": "the cat", "choices": [" sat", " sang a song", " sa"], "answer": 0},
    {"context": "", "choices": ["dogs bark", "dogs bars"], "answer": 1},
    {"context": "one two three four ", "choices": ["five", "six and seven"], "answer": 0},
    {"context": "<|unk|><|pad|>", "choices": ["<|unk|><|pad|>", "<|pad|><|unk|>"], "answer": 1},
    {"context": "<|pad|><|unk|>", "choices": ["<|unk|><|unk|>", "<|pad|><|unk|>"], "answer": 1},
]
TEXTS = ["the dog sat on the mat", "a", "birds sing in the morning, when the sun is up"]
_YAML = """
task: {name}
custom_dataset: !function items.{name}
output_type: {output_type}
test_split: test
doc_to_text: "{text}"
doc_to_target: "{target}"
target_delimiter: ""
metric_list:
  - metric: {metric}
{more}
metadata:
  version: 3
"""


def write_tasks(folder: Path, choices: list[Any] = CHOICES, texts: list[str] = TEXTS) -> Path:
    """Tasks choice, text and answer, whose documents a Python file beside them makes."""
    data = {
        "choice": choices,
        "text": [{"text": text} for text in texts],
        "answer": [{"text": text[:9]} for text in texts],
    }
    lines = [
        "import json",
        "from datasets import Dataset",
        f"DATA = json.loads({json.dumps(data)!r})",
        *(
            f"def {name}(**_): return {{'test': Dataset.from_list(DATA['{name}'])}}"
            for name in data
        ),
    ]
    folder.mkdir(exist_ok=True)
    (folder / "items.py").write_text("\n".join(lines) + "\n")
    kinds = {
        "choice": ("multiple_choice", "{{context}}", "{{answer}}", "acc"),
        "text": ("loglikelihood_rolling", "", "{{text}}", "bits_per_byte"),
        "answer": ("generate_until", "{{text}}", "{{text}}", "exact_match"),
    }
    more = {
        "choice": 'doc_to_choice: "{{choices}}"',
        "text": "",
        "answer": "generation_kwargs: {until: ['.'], max_gen_toks: 7, do_sample: false}",
    }
    for name, (output_type, text, target, metric) in kinds.items():
        filled = _YAML.format(
            name=name,
            output_type=output_type,
            text=text,
            target=target,
            metric=metric,
            more=more[name],
        )
        (folder / f"{name}.yaml").write_text(filled)
    return folder
