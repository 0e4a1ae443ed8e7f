"""Verify that both sides of a conversion are the same model: logits and greedy tokens on text.

Shapes: B texts, S tokens, V vocabulary.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from megasink.checkpoints.find import Checkpoint
from megasink.console.printable import say as say_printable
from megasink.convert.architecture import Architecture
from megasink.convert.hf_config import prediction_prefixes
from megasink.convert.megasink_model import model_class
from megasink.data.hf_tokenizer import load_tokenizer
from megasink.errors import UserError
from megasink.files.json_file import read_object
from megasink.megatron.sampling import Sampling

TOLERANCE = 1e-4
# The tolerance is for logits of this size and grows in proportion to larger ones.
_USUAL_LOGIT = 8.0
# Maximum ratio between the rounding errors of both sides.
_TIMES_WORSE = 4.0
_NEW_TOKENS = 16
_MOST_TOKENS = 256
_TEXTS = (
    "The first token of a text often draws the attention of many heads although it says little. "
    "It serves as a sink: a head that has nothing to add looks there, and its output is small. "
    "In 1879 the observatory counted 14 clear nights; three of them, in late October, were so "
    "still that the lamps on the far shore could be read like a line of print.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\nprint(mean([1, 2, 3.5]))  # 2.1666\n\nQ: What is the "
    "capital of France?\nA: Paris. It lies on the Seine, and about two million people live there.",
)


@dataclass(frozen=True)
class Difference:
    """The difference between two models: absolute logits, and fractions of equal tokens."""

    logits: float
    largest: float
    argmax: float
    generated: float | None = None

    @property
    def tolerance(self) -> float:
        """Maximum difference of the logits in float32."""
        return TOLERANCE * max(1.0, self.largest / _USUAL_LOGIT)

    def __str__(self) -> str:
        text = (
            f"logits differ by at most {self.logits:.2g} (largest logit {self.largest:.3g}), "
            f"same most likely token at {self.argmax:.2%} of positions"
        )
        if self.generated is not None:
            text += f", {self.generated:.0%} of {_NEW_TOKENS} generated tokens"
        return text


def verify_logits(
    checkpoint: Checkpoint,
    hf_folder: Path,
    model: Architecture,
    tokenizer: Any,
    say: Callable[[str], None] = say_printable,
) -> Difference:
    """Compare a checkpoint with a folder in transformers, in float32 and the model's dtype."""
    tokens_BS = sample_tokens(model, tokenizer)
    what = "text" if tokenizer is not None else "random tokens (no tokenizer)"
    ours, ours_new = _megatron(checkpoint, torch.float32, tokens_BS, model.vocabulary)
    theirs, theirs_new = _transformers(hf_folder, torch.float32, tokens_BS)
    full = difference(ours, theirs, ours_new, theirs_new)
    say(f"verified on {tokens_BS.numel()} tokens of {what}, float32: {full}")
    limit = full.tolerance
    if full.logits > limit:
        rounded, _ = _megatron(checkpoint, torch.float32, tokens_BS, model.vocabulary, rounded=True)
        error = float((rounded - ours).abs().max())
        say(f"one rounding step in every weight changes the logits by up to {error:.2g}")
        limit = max(limit, _TIMES_WORSE * error)
    if not full.logits <= limit:
        raise UserError(
            f"the conversion is not exact: {full}; the limit is {limit:.2g}. Nothing was kept. "
            "Pass --no-verify to write the output anyway"
        )
    if model.dtype == "float32":
        return full
    dtype = getattr(torch, model.dtype)
    half, half_new = _megatron(checkpoint, dtype, tokens_BS, model.vocabulary)
    half_hf, half_hf_new = _transformers(hf_folder, dtype, tokens_BS)
    say(f"verified in {model.dtype}: {difference(half, half_hf, half_new, half_hf_new)}")
    error, error_hf = (float((x - ours).abs().mean()) for x in (half, half_hf))
    if error_hf > _TIMES_WORSE * error:
        raise UserError(
            f"in {model.dtype}, logits differ from float32 by {error_hf:.2g} on average in "
            f"transformers, but by {error:.2g} in Megatron: a value that should not be "
            "rounded is rounded. Nothing was kept. Pass --no-verify to write the output anyway"
        )
    return full


def difference(
    ours_BSV: Tensor, theirs_BSV: Tensor, ours_new: list[int], theirs_new: list[int]
) -> Difference:
    """Compare logits, and greedy continuations of the first text."""
    same = ours_BSV.argmax(-1) == theirs_BSV.argmax(-1)
    equal = [a == b for a, b in zip(ours_new, theirs_new, strict=False)]
    return Difference(
        float((ours_BSV - theirs_BSV).abs().max()),
        float(ours_BSV.abs().max()),
        float(same.float().mean()),
        sum(equal) / len(equal) if equal else None,
    )


def verify_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Check the tokenizer that transformers loads from a folder, which depends on config.json."""
    other = load_tokenizer(folder)
    for text in _TEXTS:
        if tokenizer.encode(text, add_special_tokens=False) != other.encode(
            text, add_special_tokens=False
        ):
            raise UserError(
                "with this config.json, transformers loads the tokenizer "
                f"{type(other).__name__}, whose tokens differ from those of the model's tokenizer "
                f"({type(tokenizer).__name__}): choose another --target, or use --no-verify and "
                "load the tokenizer from another folder"
            )


def fits_in_memory(parameters: int) -> bool:
    """Return whether two float32 copies and working memory fit into the available memory."""
    return bool(2.5 * 4 * parameters < psutil.virtual_memory().available)


def sample_tokens(model: Architecture, tokenizer: Any) -> Tensor:
    """Return [B, S] tokens of real text, or random ones without a tokenizer; none are padding."""
    most = min(_MOST_TOKENS, model.positions - _NEW_TOKENS)
    if most < 2:
        raise UserError(f"{model.positions} positions are too few to verify: use --no-verify")
    if tokenizer is None:
        generator = torch.Generator().manual_seed(1234)
        return torch.randint(model.vocabulary, (2, min(most, 64)), generator=generator)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in _TEXTS]
    length = min(most, *map(len, texts))
    return torch.tensor([text[:length] for text in texts])


@torch.no_grad()
def _megatron(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    tokens_BS: Tensor,
    vocabulary: int,
    *,
    rounded: bool = False,
) -> tuple[Tensor, list[int]]:
    """Return logits and greedy tokens; with `rounded`, each weight one step of its dtype away."""
    from megasink.checkpoints.load import load_without_tokenizer
    from megasink.megatron.decoding import generate

    model, _ = load_without_tokenizer(checkpoint, dtype, vocabulary)
    generator = torch.Generator().manual_seed(1234)
    for parameter in model.parameters() if rounded else ():
        sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
        parameter.copy_(torch.nextafter(parameter, sign * torch.inf))
    logits = megatron_logits(model, tokens_BS, vocabulary)
    prompts, greedy = [tokens_BS[0].tolist()], Sampling(temperature=0)
    made = generate(model, prompts, _NEW_TOKENS, greedy, vocabulary=vocabulary)
    new = list(made.tokens[0])
    del model
    gc.collect()
    return logits.cpu(), new


def megatron_logits(model: Any, tokens_BS: Tensor, vocabulary: int) -> Tensor:
    """Return the [B, S, V] logits of a Megatron model, in float32 on its device."""
    tokens_BS = tokens_BS.to(next(model.parameters()).device)
    positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    logits: Tensor = model(tokens_BS, positions_BS, None, runtime_gather_output=True)
    return logits[..., :vocabulary].float()


@torch.no_grad()
def _transformers(folder: Path, dtype: torch.dtype, tokens_BS: Tensor) -> tuple[Tensor, list[int]]:
    import transformers

    loaded: Any
    unpacked = {}
    of_transformers: Any = transformers  # whose Mxfp4Config mypy does not see
    if read_object(folder / "config.json").get("quantization_config"):
        unpacked = {"quantization_config": of_transformers.Mxfp4Config(dequantize=True)}
    try:
        loaded = model_class(folder).from_pretrained(
            folder,
            **unpacked,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises nearly anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"transformers {transformers.__version__} cannot load the model: {reason}"
        ) from error
    model, loading = loaded
    # transformers knows the prediction layers of released models by their numbers alone.
    prefixes, extra = prediction_prefixes(model.config.to_dict()), loading["unexpected_keys"]
    loading["unexpected_keys"] = {name for name in extra if not name.startswith(prefixes)}
    wrong = [f"{kind}: {names}" for kind, names in loading.items() if names]
    if wrong:
        raise UserError(f"transformers does not load all weights: {'; '.join(wrong)}")
    model.eval()
    logits = model(tokens_BS).logits
    first = tokens_BS[:1]
    made = model.generate(
        first,
        attention_mask=torch.ones_like(first),
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    new = made[0, first.shape[1] :].tolist()
    del model, loaded
    gc.collect()
    return logits.float(), new
