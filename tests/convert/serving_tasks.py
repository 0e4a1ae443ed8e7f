"""Task for a worker: an exported model as it is served, in batches of different lengths."""

from pathlib import Path
from typing import Any

import torch

LENGTHS, NEW_TOKENS = (23, 9, 17), 6


@torch.no_grad()
def served(folder: str, implementations: list[str]) -> dict[str, Any]:
    """What attention implementations make of left-padded rows, against each row alone in eager."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(101, (length,), generator=generator) for length in LENGTHS]
    width = max(LENGTHS)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, (tokens_S, mask_S) in zip(rows, zip(tokens, mask, strict=True), strict=True):
        tokens_S[width - len(row) :], mask_S[width - len(row) :] = row, 1

    def load(implementation: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder), dtype=torch.float32, attn_implementation=implementation
        ).eval()

    def generate(model: Any, batch: Any, attention_mask: Any, cache: bool) -> Any:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": cache}
        made = model.generate(
            batch, attention_mask=attention_mask, eos_token_id=None, pad_token_id=0, **options
        )
        return made[:, batch.shape[1] :]

    eager = load("eager")
    alone = [eager(row[None]).logits[0] for row in rows]
    continued = torch.cat([generate(eager, r[None], torch.ones_like(r[None]), False) for r in rows])
    reports: dict[str, Any] = {}
    for implementation in implementations:
        try:
            model = load(implementation)
            logits = model(tokens, attention_mask=mask).logits
            new = generate(model, tokens, mask, True)
        except Exception as error:
            reports[implementation] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        different = [
            float((out[width - len(row) :] - row).abs().max())
            for out, row in zip(logits, alone, strict=True)
        ]
        reports[implementation] = {
            "logits": max(different),
            "largest": max(float(row.abs().max()) for row in alone),
            "generated": torch.equal(new, continued),
        }
    return reports
