"""Retrieval of a model of `RetrievalLanguage` by length and distance, with YaRN or without.

Shapes: D documents, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.replicate.languages import RetrievalLanguage
from megasink.cli.demo_runs import LETTERS
from megasink.errors import UserError

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Distance from the query back to its key, as a share of the document."""
_BATCH_TOKENS = 1 << 15


@dataclass(frozen=True)
class Retrieval:
    """Results of one length.

    Attributes:
        letters: of a document; it has a BOS more.
        accuracy: share of queries at which the answer is the most likely value; of `values` equally
            likely ones, chance is 1 / `values`.
        loss: mean -ln p(answer) over the whole vocabulary, in nats.
        accuracy_by_depth: for each of `DEPTHS`.
        queries: in all.
    """

    letters: int
    accuracy: float
    loss: float
    accuracy_by_depth: list[float]
    queries: int


def retrieval(
    run: Path,
    language: RetrievalLanguage,
    lengths: Sequence[int],
    *,
    yarn: float | None = None,
    documents: int = 32,
    pairs: int = 4,
    seed: int = 20,
) -> list[Retrieval]:
    """Measure the newest checkpoint of a run, on this process's platform.

    Args:
        run: trained on this language, with the tokenizer of `write_tokenizer`.
        lengths: letters of the documents.
        yarn: see `megasink.checkpoints.load.load_model`.
        documents: for each length and depth; the same for every run, by `seed`.
        pairs: planted in a document.

    Raises:
        UserError: a length exceeds the positions of the model, or as `load_model`.
    """
    from megasink.checkpoints.load import load_model, single_process

    with single_process():
        model, tokenizer, args, *_ = load_model(run, yarn=yarn)
        longest = args.max_position_embeddings - 1
        if max(lengths) > longest:
            raise UserError(f"{max(lengths)} letters: {run} has room for {longest} behind a BOS")
        token_ids = np.array(tokenizer.convert_tokens_to_ids(list(LETTERS)))
        return [
            _of_length(
                model, tokenizer.bos_token_id, token_ids, language, n, documents, pairs, seed
            )
            for n in lengths
        ]


def _of_length(
    model: torch.nn.Module,
    bos: int,
    token_ids: NDArray[np.int64],
    language: RetrievalLanguage,
    letters: int,
    documents: int,
    pairs: int,
    seed: int,
) -> Retrieval:
    values = torch.from_numpy(token_ids[list(language.value_ids)])
    right, losses = [], []
    for depth in DEPTHS:
        distance = max(2, round(depth * (letters - 2)))
        ids_DL, answers_D = language.probes(documents, letters, distance, seed, pairs=pairs)
        first_D1 = np.full((documents, 1), bos)
        tokens_DT = torch.from_numpy(np.concatenate([first_D1, token_ids[ids_DL]], 1))
        logits_DV = last_logits(model, tokens_DT).double()
        answers = torch.from_numpy(token_ids[answers_D])
        logp_D = logits_DV.log_softmax(-1).gather(1, answers[:, None])[:, 0]
        chosen_D = values[logits_DV[:, values].argmax(-1)]
        right.append(float((chosen_D == answers).double().mean()))
        losses.append(-float(logp_D.mean()))
    return Retrieval(
        letters=letters,
        accuracy=float(np.mean(right)),
        loss=float(np.mean(losses)),
        accuracy_by_depth=right,
        queries=documents * len(DEPTHS),
    )


@torch.no_grad()
def last_logits(model: Any, tokens_DT: torch.Tensor) -> torch.Tensor:
    """Return [D, V] the logits behind the last token of every document."""
    device = next(model.parameters()).device
    rows = []
    for part in tokens_DT.split(max(1, _BATCH_TOKENS // tokens_DT.shape[1])):
        part_DT = part.to(device)
        positions = torch.arange(part.shape[1], device=device).expand(part.shape)
        rows.append(model(part_DT, positions, None)[:, -1].cpu())
    return torch.cat(rows)
