"""Tasks of lm-eval for the tests, models that are scored on them, and the comparison."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.checkpoints.hf_entries import with_ends

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


def write_tasks(
    folder: Path,
    choices: list[Any] = CHOICES,
    texts: list[str] = TEXTS,
    answers: list[str] | None = None,
    generation: str = "{until: ['.'], max_gen_toks: 7, do_sample: false}",
) -> Path:
    """Tasks choice, text and answer, whose documents a Python file beside them makes."""
    data = {
        "choice": choices,
        "text": [{"text": text} for text in texts],
        "answer": [{"text": t} for t in answers or [text[:9] for text in texts]],
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
        "answer": f"generation_kwargs: {generation}",
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


def probed(model, tokenizer, **options):
    fields = {
        "module": model,
        "heads": [4, 4],
        "tokenizer": tokenizer,
        "vocabulary": model.config.vocab_size,
        "positions": model.config.max_position_embeddings,
        "facts": {"name": "tiny"},
        "generation": with_ends(model.generation_config.to_dict(), tokenizer),
    }

    def open_probe(listener, changes=()):
        return TransformersProbe(model, listener, changes)

    return ProbedModel(open_probe, **(fields | options))


def answers(results):
    """By task, what was answered to each request."""
    return {
        name: [response for entry in entries for response in responses(entry["resps"])]
        for name, entries in results.samples.items()
    }


def responses(found):
    return [response[0] for response in found]


def compare(found, expected, atol=2e-5):
    """Scores within rounding of float32; whether they are the argmax, and texts, exactly."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert len(found[name]) == len(expected[name])
        for one, other in zip(found[name], expected[name], strict=True):
            if isinstance(other, str):
                assert one == other
                continue
            one, other = (x if isinstance(x, tuple) else (x, None) for x in (one, other))
            assert one[0] == pytest.approx(other[0], abs=atol, rel=1e-6)
            assert one[1] == other[1]


def by_lm_eval(model, tasks, batch_size=4):
    """The same by lm-eval's own class."""
    lm_eval = pytest.importorskip("lm_eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs accelerate")
    lm = huggingface.HFLM(pretrained=model.module, tokenizer=model.tokenizer, batch_size=batch_size)
    found = lm_eval.evaluate(lm=lm, task_dict=tasks.loaded, log_samples=True, bootstrap_iters=10)
    return found


class Reading:
    """Keeps what the model reads."""

    def __init__(self, model):
        self.batches = []
        self.model = replace(model, open_probe=self.open)
        self.inner = model.open_probe

    def open(self, listener, changes=()):
        probe = self.inner(listener, changes)
        forward = probe.forward

        def kept(ids, *rest, **named):
            assert not rest
            assert not named
            self.batches.append(ids.clone())
            return forward(ids)

        probe.forward = kept
        return probe

    @property
    def rows(self):
        return sorted(tuple(row) for batch in self.batches for row in batch.tolist())
