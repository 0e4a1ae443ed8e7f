"""A run that is scored by lm-eval, for the workers."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megasink.analysis.capture.megatron_model import MegatronProbe
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.evaluate.harness import evaluate
from megasink.analysis.evaluate.tasks_loading import load_tasks
from megasink.analysis.interventions import ZeroHeads
from megasink.checkpoints.hf_entries import with_ends
from megasink.megatron.model_blocks import blocks_in
from tests.analysis.interventions.harness_tasks import CHOICES, TEXTS
from tests.megatron.decoding_tasks import model_of


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character; 0 is <eos>, and there is no BOS."""
    known = ["<eos>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(known)}, "~"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@torch.no_grad()
def run_scored(folder: str, heads: list[tuple[int, int]], **options: Any) -> dict[str, Any]:
    """What lm-eval asked of a GPT of Megatron and got, and the same by whole forward passes."""
    model, tokenizer = model_of(**options), character_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(list("~}"))
    probed = ProbedModel(
        partial(MegatronProbe, model),
        module=model,
        heads=[model.config.num_attention_heads] * model.config.num_layers,
        tokenizer=tokenizer,
        vocabulary=len(tokenizer),
        positions=48,
        first=tuple(tokens),
        generation=with_ends({}, tokenizer),
        facts={},
    )
    tasks = load_tasks(["choice", "answer"], folders=[Path(folder)])
    changes = [ZeroHeads(heads)] if heads else []
    results = evaluate(probed, changes, tasks, batch_size=2, samples=True)
    size = model.config.kv_channels
    for layer, head in heads:
        projection = blocks_in(model)[layer].attention.linear_proj.weight
        projection[:, head * size : (head + 1) * size] = 0

    def logits(ids: list[int]) -> torch.Tensor:
        ids_1T = torch.tensor([ids])
        out_1TV = model(ids_1T, torch.arange(len(ids))[None], None)
        return out_1TV[0, :, : len(tokenizer)]

    by_hand = []
    for item in CHOICES:
        context = tokenizer.encode(item["context"].rstrip()) or [tokenizer.eos_token_id]
        spaces = " " * (len(item["context"]) - len(item["context"].rstrip()))
        for choice in item["choices"]:
            answer = tokenizer.encode(spaces + choice)
            ids = [*tokens, *context, *answer]
            logs = logits(ids[:-1])[-len(answer) :].double().log_softmax(-1)
            by_hand.append(float(logs.gather(1, torch.tensor(answer)[:, None]).sum()))
    answers = []
    for text in TEXTS:
        ids = [*tokens, *tokenizer.encode(text[:9])]
        start = len(ids)
        while len(ids) < start + 7 and "." not in tokenizer.decode(ids[start:]):
            ids.append(int(logits(ids)[-1].argmax()))
        answers.append(tokenizer.decode(ids[start:], skip_special_tokens=True).split(".")[0])
    return {
        "scores": [r[0][0] for s in results.samples["choice"] for r in s["resps"]],
        "by hand": by_hand,
        "answers": [s["resps"][0][0] for s in results.samples["answer"]],
        "answers by hand": answers,
    }
