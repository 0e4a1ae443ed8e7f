"""Whether two sides of a conversion are the same model: logits and greedy tokens on real text.

Shapes: B texts, S tokens, V vocabulary.
"""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasink.checkpoint.find import Checkpoint
from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import model_class
from megasink.errors import UserError
from megasink.printable import say as say_printable

TOLERANCE = 1e-4
# The logits for which the tolerance is meant; it grows with larger ones.
_USUAL_LOGIT = 8.0
# Rounding in half precision may differ, but not by more than this, from side to side.
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
    """How far two models are apart.

    Attributes:
        logits: largest absolute difference.
        largest: the largest absolute logit.
        argmax: share of positions with the same most likely token.
        generated: share of new greedy tokens that are the same; None where none were made.
    """

    logits: float
    largest: float
    argmax: float
    generated: float | None = None

    @property
    def tolerance(self) -> float:
        """What the logits may differ by in float32."""
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
    found: Checkpoint,
    hf_folder: Path,
    model: Architecture,
    tokenizer: Any,
    say: Callable[[str], None] = say_printable,
) -> Difference:
    """Compare a Megatron checkpoint with a Hugging Face folder in stock transformers.

    Once in float32, which decides, and once in the model's data type, where the folder may be at
    most four times as far from float32 as the checkpoint is.

    Args:
        tokenizer: for real text; None for random tokens.

    Returns:
        the difference in float32.

    Raises:
        UserError: they are not the same model, or transformers does not load it.
    """
    tokens_BS = sample_tokens(model, tokenizer)
    what = "text" if tokenizer is not None else "random tokens (there is no tokenizer)"
    ours, ours_new = _megatron(found, torch.float32, tokens_BS, model.vocabulary)
    theirs, theirs_new = _transformers(hf_folder, torch.float32, tokens_BS)
    full = difference(ours, theirs, ours_new, theirs_new)
    say(f"verified on {tokens_BS.numel()} tokens of {what}, float32: {full}")
    if not full.logits <= full.tolerance:
        raise UserError(
            f"the conversion is not exact: {full}; allowed {full.tolerance:.2g}. Nothing was kept; "
            "--no-verify writes it all the same"
        )
    if model.dtype == "float32":
        return full
    dtype = getattr(torch, model.dtype)
    half, half_new = _megatron(found, dtype, tokens_BS, model.vocabulary)
    half_hf, half_hf_new = _transformers(hf_folder, dtype, tokens_BS)
    say(f"verified in {model.dtype}: {difference(half, half_hf, half_new, half_hf_new)}")
    error, error_hf = (float((x - ours).abs().mean()) for x in (half, half_hf))
    if error_hf > _TIMES_WORSE * error:
        raise UserError(
            f"in {model.dtype} transformers is {error_hf:.2g} from float32 on average, Megatron "
            f"{error:.2g}: something is rounded that should not be. --no-verify writes it all the "
            "same"
        )
    return full


def difference(
    ours_BSV: Tensor, theirs_BSV: Tensor, ours_new: list[int], theirs_new: list[int]
) -> Difference:
    """Of logits, and of greedy continuations of the first text."""
    same = ours_BSV.argmax(-1) == theirs_BSV.argmax(-1)
    equal = [a == b for a, b in zip(ours_new, theirs_new, strict=False)]
    return Difference(
        float((ours_BSV - theirs_BSV).abs().max()),
        float(ours_BSV.abs().max()),
        float(same.float().mean()),
        sum(equal) / len(equal) if equal else None,
    )


def verify_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Whether a folder's tokenizer, as transformers loads it from there, is a given one.

    transformers chooses a tokenizer by the architecture beside it too: a folder of Qwen2 gets
    Qwen2's splitting of words whatever its tokenizer.json says.

    Raises:
        UserError: it gives other tokens.
    """
    from megasink.data.tokenizer import load_tokenizer

    other = load_tokenizer(folder)
    for text in _TEXTS:
        if tokenizer.encode(text, add_special_tokens=False) != other.encode(
            text, add_special_tokens=False
        ):
            raise UserError(
                f"beside this config.json transformers loads {type(other).__name__}, which gives "
                f"other tokens than the tokenizer of the model ({type(tokenizer).__name__}): "
                "choose another --target, or use --no-verify and load the tokenizer from elsewhere"
            )


def verify_tensors(written: Iterable[tuple[str, Tensor, Tensor]], folder: Path) -> int:
    """Compare, to the bit, everything that is in a written folder with what it was made from.

    Args:
        written: name, as it is read from there, as it was made.

    Returns:
        how many tensors.

    Raises:
        UserError: one differs.
    """
    count = 0
    for name, found, wanted in written:
        if found.dtype != wanted.dtype or not torch.equal(found, wanted):
            raise UserError(f"{folder}: {name} is not what was written: a broken disk?")
        count += 1
    return count


def fits_in_memory(parameters: int) -> bool:
    """Whether two copies in float32, with room to compute, fit into the memory that is free."""
    needed = 2.5 * 4 * parameters
    return needed < _free_bytes()


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def sample_tokens(model: Architecture, tokenizer: Any) -> Tensor:
    """[B, S] of real text where there is a tokenizer, of one length: padding is another matter.

    Raises:
        UserError: the model has too few positions.
    """
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
    found: Checkpoint, dtype: torch.dtype, tokens_BS: Tensor, vocabulary: int
) -> tuple[Tensor, list[int]]:
    from megasink.checkpoint.load import load_without_tokenizer
    from megasink.inference.decoding import generate
    from megasink.inference.sampling import Sampling

    model, _ = load_without_tokenizer(found, dtype, vocabulary)
    device = next(model.parameters()).device
    tokens = tokens_BS.to(device)
    positions = torch.arange(tokens.shape[1], device=device).expand(len(tokens), -1)
    logits = model(tokens, positions, None, runtime_gather_output=True)
    made = generate(
        model,
        [tokens_BS[0].tolist()],
        _NEW_TOKENS,
        Sampling(temperature=0),
        vocabulary=vocabulary,
    )
    new = list(made.tokens[0])
    del model
    gc.collect()
    return logits[..., :vocabulary].float().cpu(), new


@torch.no_grad()
def _transformers(folder: Path, dtype: torch.dtype, tokens_BS: Tensor) -> tuple[Tensor, list[int]]:
    import transformers

    loaded: Any
    try:
        loaded = model_class(folder).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises nearly anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"transformers {transformers.__version__} does not load it: {reason}"
        ) from error
    model, loading = loaded
    wrong = [f"{kind}: {names}" for kind, names in loading.items() if names]
    if wrong:
        raise UserError(f"transformers loads it, but not all of it: {'; '.join(wrong)}")
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
