"""What the tests of `megasink ablate` on texts share: a model, two datasets, the command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.result_schemas import AblationResults
from megasink.files.checked_fields import from_json
from tests.analysis.capture.tiny_models import save_with_tokenizer

TEXTS = [
    "Zeroed heads write nothing, and what a model loses by it says what they wrote before.",
    "Random heads are the baseline: they cost the most of all heads that are zeroed here.",
    "Short, but not empty.",
]
PERCENTS = (0, 10, 30)
HEADS, LENGTH = 4, 14


def make_folder(root: Path) -> Path:
    """A model, and two datasets."""
    save_with_tokenizer(root, "llama", TEXTS, tokens=330)
    for name, texts in (("first", TEXTS[:2]), ("second", TEXTS[2:])):
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
        (root / f"{name}.jsonl").write_text(lines)
    return root


def command(folder: Path, output: Path, *flags: str) -> list[str]:
    """Two samples of one dataset and one of another."""
    texts = f"{folder}/first.jsonl {folder}/second.jsonl"
    base = f"ablate {folder}/llama --data {texts} --output {output} --device cpu"
    base += f" --seq-length {LENGTH}"
    if "--score" in flags or not {"--heads", "--layer", "--interventions"} & set(flags):
        base += f" --zeroed {' '.join(map(str, PERCENTS))} --seeds 4 5"
    return [*base.split(), *flags]


def results_of(output: Path) -> AblationResults:
    content = json.loads((output / "ablation.json").read_text())
    results: AblationResults = from_json(AblationResults, content, "it")
    return results


def count_forwards(monkeypatch: Any) -> list[Any]:
    """The calls of the model from now on."""
    forward, calls = TransformersProbe.forward, []

    def counted(probe: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(probe, *args, **kwargs)

    monkeypatch.setattr(TransformersProbe, "forward", counted)
    return calls


class ByHand:
    """The model with hooks of our own in front of its output projections."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder / "llama")
        tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
        self.samples = [tokenizer.encode(text)[:LENGTH] for text in TEXTS]
        self.choose = None
        for layer, block in enumerate(self.model.model.layers):
            block.self_attn.o_proj.register_forward_pre_hook(
                lambda _, args, layer=layer: self._zero(layer, args[0])
            )

        first = self.model.model.layers[0].mlp.down_proj
        first.register_forward_pre_hook(lambda _, args: self.activations.append(args[0][0]))

    def _zero(self, layer, out_1TX):
        out_THD = out_1TX[0].unflatten(-1, (HEADS, -1))
        norm_H = out_THD.norm(dim=-1).mean(0)
        score_H = norm_H / norm_H.mean()
        self.scores.append(score_H.tolist())
        zeroed_H = torch.tensor([self.choose(layer, h, score_H[h]) for h in range(HEADS)])
        self.masks.append(zeroed_H.tolist())
        return (out_THD * ~zeroed_H[:, None]).flatten(1)[None]

    @torch.no_grad()
    def run(self, choose):
        """Nats [N] and targets [N], scores and masks [N, L, H]."""
        self.choose, self.scores, self.masks, self.activations = choose, [], [], []
        nats, targets = [], []
        for tokens in self.samples:
            ids = torch.tensor([tokens])
            log_TV = self.model(ids, use_cache=False).logits[0].double().log_softmax(-1)
            nats.append(-float(log_TV[:-1].gather(1, ids[0, 1:, None]).sum()))
            targets.append(len(tokens) - 1)
        shape = (len(TEXTS), -1, HEADS)
        found = (np.asarray(self.scores).reshape(shape), np.asarray(self.masks).reshape(shape))
        return np.asarray(nats), np.asarray(targets), *found

    def slopes(self, layer, head, step=1e-2):
        """[N]: derivative of each text's mean loss by a factor of a head, at 1."""
        sides = []
        for factor in (1 - step, 1 + step):

            def scaled(_, args, factor=factor):
                out_1THD = args[0].unflatten(-1, (HEADS, -1)).clone()
                out_1THD[:, :, head] *= factor
                return out_1THD.flatten(-2)

            hook = self.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(scaled)
            nats, targets, _, _ = self.run(never)
            hook.remove()
            sides.append(nats / targets)
        return (sides[1] - sides[0]) / (2 * step)


def never(layer, head, score):
    return False
