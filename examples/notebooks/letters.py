"""A small Llama that learns a language of letters, in which an attention sink forms in a minute.

Plain PyTorch and transformers; the notebooks beside this file look into the model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megasink.cli.demo_runs import TriggerLanguage, texts_of, write_tokenizer
from megasink.console.progress import tracked

LANGUAGE = TriggerLanguage()
LENGTH = 62  # letters of a text; with BOS and EOD, 64 tokens
BATCH, STEPS, RATE = 8, 600, 1e-2


def texts(count: int, seed: int, language: TriggerLanguage = LANGUAGE) -> list[str]:
    """Return texts of a language."""
    return list(texts_of(language.sample(count, LENGTH, seed)))


def batches(
    tokenizer: Any, steps: int, seed: int, language: TriggerLanguage = LANGUAGE
) -> Iterator[torch.Tensor]:
    """Yield tokens [8, 64], BOS first and EOD last.

    The model must learn when a text ends: it counts by the weight of BOS. Without EOD no sink forms
    here.
    """
    for step in range(steps):
        found = [text + tokenizer.eos_token for text in texts(BATCH, seed + step, language)]
        yield tokenizer(found, return_tensors="pt")["input_ids"]


def learning_rate(step: int, steps: int) -> float:
    """Return a linear warmup over a twentieth of the steps, and a linear decay to a tenth."""
    warmup = steps // 20 + 1
    return RATE * min((step + 1) / warmup, 1 - 0.9 * step / steps)


def train(folder: Path, steps: int = STEPS) -> Path:
    """Train the model, unless the folder is there, and save it with its tokenizer."""
    if folder.is_dir():
        return folder
    write_tokenizer(folder.with_name(f"{folder.name}-tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(folder.with_name(f"{folder.name}-tokenizer"))
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=128,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    made = batches(tokenizer, steps, seed=1000)
    for step, ids in enumerate(tracked(made, "training", steps, "steps")):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
