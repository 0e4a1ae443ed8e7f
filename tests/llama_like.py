"""A tokenizer written as Llama 2's is: a space is put before each text."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def llama_like(
    tokenizer: Any, *, dummy_prefix: bool = True, bos: str | None = None, legacy: bool = True
) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer as Llama 2's, or with no dummy prefix as Gemma's.

    Args:
        bos: token that it puts before texts.
        legacy: add the space to every text, by a normalizer; else only where there is none, by the
            pre-tokenizer.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    model["vocab"] = {t.replace(" ", "\u2581"): i for t, i in model["vocab"].items()}
    model["merges"] = [[p.replace(" ", "\u2581") for p in pair] for pair in model["merges"]]
    backend = Tokenizer.from_str(json.dumps(state | {"pre_tokenizer": None}))
    prepend = [normalizers.Prepend("\u2581")] if dummy_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    if not legacy:
        backend.normalizer = None
        scheme = "first" if dummy_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = None
    if bos:
        pair = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[pair]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token)
    if bos:
        made.bos_token = bos
    return made
