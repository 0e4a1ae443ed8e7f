"""A probed model for lm-evaluation-harness: token scores and greedy text.

lm-eval's own class pads batches without a mask, so interventions that score heads would read
padding. Here every batch has rows of one length.

Shapes: B rows, T tokens, N scored tokens, V vocabulary.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from megasink.analysis.capture.input_samples import unknown_id
from megasink.analysis.capture.probe import Probe, ProbedModel, takes_seconds
from megasink.analysis.interventions.intervention_types import Intervention
from megasink.console.progress import progress
from megasink.data.hf_tokenizer import leading_ids
from megasink.data.text_tokenizer import text_tokenizer
from megasink.errors import UserError


class ByWholePasses(PreTrainedModel, GenerationMixin):
    """A run wrapped as a transformers model for `generate`; interventions apply in each pass."""

    def __init__(self, model: ProbedModel, probe: Probe):
        super().__init__(PretrainedConfig())
        self.generation_config = GenerationConfig(**model.generation | {"use_cache": False})
        self._run, self._probe = model, probe

    @property
    def device(self) -> torch.device:
        return self._run.device

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        logits_B1V = self._probe.forward(input_ids).logits[:, -1:]
        return CausalLMOutput(logits=logits_B1V[..., : self._run.vocabulary])


class Stop:
    """Stops a row once its last tokens contain a stop string; `lengths` include the prompt."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], start: int, rows: int):
        self.tokenizer, self.stops, self.start = tokenizer, stops, start
        # A token may be one byte, and a stop string may begin and end inside others.
        self.most = max((len(stop.encode()) for stop in stops), default=0) + 2
        self.lengths: list[int | None] = [None] * rows

    def __call__(self, ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        new_BT = ids_BT[:, max(self.start, ids_BT.shape[1] - self.most) :]
        for row, text in enumerate(self.tokenizer.batch_decode(new_BT) if self.stops else ()):
            if self.lengths[row] is None and any(stop in text for stop in self.stops):
                self.lengths[row] = ids_BT.shape[1]
        return torch.tensor([length is not None for length in self.lengths], device=ids_BT.device)


AUTO = "auto"
POSITIONS = 2048
"""Maximum length that is used for a model without a limit, as in lm-eval."""
NEW_TOKENS = 256
"""Number of tokens to generate if a task sets none, as in lm-eval."""
_LOGITS, _ROWS = 1 << 28, 128  # logits of an automatic batch (1 GiB in float32), and its rows
_SAMPLING = ("temperature", "top_p", "top_k")  # of no effect on greedy answers


_Row = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a request: the input, and the tokens to score at its end."""


class HarnessModel(TemplateLM):
    """Scores continuations and generates text with an open probe.

    Sequences are lm-eval's, except that perplexity tasks score each text after one BOS, not two.
    Interventions then change the tokens, and the model's `first` tokens come before all.
    """

    def __init__(
        self,
        model: ProbedModel,
        probe: Probe,
        interventions: Sequence[Intervention],
        batch_size: int | str,
        *,
        parse_special_tokens: bool = False,
    ):
        super().__init__()
        self.model, self.probe, self.tokenizer = model, probe, model.tokenizer
        self.interventions, self.batch_size = list(interventions), batch_size
        self.max_length = (model.positions or POSITIONS) - len(model.first)
        self.unscored = self.cut = 0
        self._halvings = 0
        self._leading, self._parses = leading_ids(self.tokenizer), parse_special_tokens
        self._text = text_tokenizer(self.tokenizer, parse_special_tokens=parse_special_tokens)
        self._device = model.device

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """BOS or the end-of-document token; precedes a text without a context."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return ids, by default with the tokenizer's leading ids unless the text has them."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not (self._parses and has_bos_prefix(string, prefix))
        return [*(self._leading if add_special_tokens else ()), *self._text.ids(string)]

    def loglikelihood(
        self, instances: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = super().loglikelihood(instances, disable_tqdm=True)
        return scores

    def loglikelihood_rolling(self, instances: list[Any], disable_tqdm: bool = True) -> list[float]:
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for (text,) in (instance.args for instance in instances):
            tokens, prefix = self.tok_encode(text), self.prefix_token_id
            if tokens[:1] == [prefix]:
                tokens = tokens[1:]  # the windows add it themselves
            windows = list(utils.get_rolling_token_windows(tokens, prefix, self.max_length, 1))
            pairs += map(utils.make_disjoint_window, windows)
            counts.append(len(windows))
        scores = iter(self._scores(pairs))
        return [sum(score for score, _ in itertools.islice(scores, n)) for n in counts]

    def _loglikelihood_tokens(
        self, encoded: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in encoded])

    @torch.no_grad()
    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood in nats of each continuation, and whether it is the argmax."""
        rows = [self._row(context, continuation) for context, continuation in pairs]
        asking: dict[tuple[int, ...], list[int]] = {}  # sequences that several requests share
        for i, (tokens, targets) in enumerate(rows):
            if targets:
                asking.setdefault(tokens, []).append(i)
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        slow = takes_seconds(self.model.module)
        with progress("evaluate", len(rows), "requests", slow=slow) as tell:
            done = 0
            for batch, logits_BTV in self._batches(list(asking)):
                for tokens, logits_TV in zip(batch, logits_BTV, strict=True):
                    for i in asking[tokens]:
                        scores[i] = _score(logits_TV, rows[i][1])
                        done += 1
                del logits_BTV, logits_TV  # before those of the next batch are made
                tell(done)
        return scores

    def _batches(
        self, sequences: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[list[tuple[int, ...]], Tensor]]:
        """Yield batches of one length, longest first, with their logits [B, T, V]."""
        ordered = sorted(sequences, key=lambda tokens: (-len(tokens), tokens))
        for length, same in itertools.groupby(ordered, key=len):
            left = list(same)
            while left:
                rows = self._rows(length)
                try:
                    yield left[:rows], self._logits(left[:rows])
                except torch.OutOfMemoryError as error:
                    if self.batch_size != AUTO or rows == 1:
                        raise UserError(
                            f"not enough memory for a batch of {rows} sequences of {length} "
                            "tokens: lower --batch-size"
                        ) from error
                    self._halvings += 1
                    torch.cuda.empty_cache()
                    continue
                left = left[rows:]

    def _rows(self, length: int) -> int:
        if self.batch_size != AUTO:
            return int(self.batch_size)
        fitting = _LOGITS // (self.model.vocabulary * length)
        return max(1, min(fitting, _ROWS) >> self._halvings)

    def _logits(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return logits [B, T, V] without the rows that pad the vocabulary."""
        ids_BT = torch.tensor(sequences, device=self._device)
        logits_BTV: Tensor = self.probe.forward(ids_BT).logits
        return logits_BTV[..., : self.model.vocabulary]

    def _row(self, context: list[int], continuation: list[int]) -> _Row:
        if len(continuation) > self.max_length:
            raise UserError(
                f"a task scores a continuation of {len(continuation)} tokens, but the model has "
                f"{self.max_length} positions: choose a model with more, or another task"
            )
        tokens = self._read([*context, *continuation], self.max_length + 1)
        scored = tokens[len(tokens) - len(continuation) :]
        if scored != continuation:
            raise UserError(
                "an intervention changed or removed tokens that a task scores: use one that "
                "changes only earlier tokens"
            )
        lost = len(continuation) - (len(self.model.first) + len(tokens) - 1)
        if lost > 0:
            self.unscored += lost
        return (*self.model.first, *tokens[:-1]), tuple(continuation[max(lost, 0) :])

    def _read(self, tokens: list[int], most: int) -> list[int]:
        """Return the tokens that the model reads instead, at most the last `most`."""

        def changed(tokens: list[int]) -> list[int]:
            for intervention in self.interventions:
                tokens = intervention.tokens(tokens, self.tokenizer.bos_token_id)
            return tokens

        if len(tokens) > most:
            self.cut += 1
            tokens = tokens[-most:]
        read = changed(tokens)
        if len(read) > most:
            self.cut += 1
            read = changed(tokens[len(read) - most :])
        if (highest := max(read, default=0)) >= self.model.vocabulary:
            raise unknown_id(self.model, highest)
        return read

    @torch.no_grad()
    def generate_until(self, instances: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return greedy continuations; prompts of equal length and settings share a batch."""
        jobs: dict[tuple[int, int, tuple[str, ...]], list[tuple[int, tuple[int, ...]]]] = {}
        for i, (text, generation) in enumerate(instance.args for instance in instances):
            new, stops = self._settings(generation)
            tokens = self.tok_encode(text) or [self.prefix_token_id]
            prompt = (*self.model.first, *self._read(tokens, self.max_length - new))
            if not prompt:
                raise UserError("an intervention removed every token of a question: use another")
            jobs.setdefault((len(prompt), new, stops), []).append((i, prompt))
        texts = [""] * len(instances)
        slow = takes_seconds(self.model.module)
        with progress("evaluate", len(instances), "answers", slow=slow) as tell:
            done = 0
            for (length, new, stops), prompts in sorted(jobs.items(), reverse=True):
                for batch in itertools.batched(prompts, self._rows(length + new)):
                    made = self._continued([prompt for _, prompt in batch], new, stops)
                    for (i, _), text in zip(batch, made, strict=True):
                        texts[i] = text
                    done += len(batch)
                    tell(done)
        return texts

    def _settings(self, generation: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
        """Return the most tokens that a task generates, and the strings that end an answer."""
        settings: Any = normalize_gen_kwargs(generation, NEW_TOKENS)
        new, until = settings.pop("max_gen_toks"), settings.pop("until")
        if settings.pop("do_sample"):
            raise UserError(
                "a task samples its answers, but megasink generates greedily: choose another task"
            )
        other = [f"{key} {value}" for key, value in settings.items() if key not in _SAMPLING]
        if other and other != ["num_beams 1"]:
            raise UserError(
                f"a task sets {', '.join(other)}, but megasink generates greedily: choose "
                "another task"
            )
        if not 0 < new < self.max_length:
            raise UserError(
                f"a task generates up to {new} tokens, but the model has {self.max_length} "
                "positions: choose another task"
            )
        return new, tuple(stop for stop in until if stop)

    def _continued(
        self, prompts: Sequence[tuple[int, ...]], new: int, stops: Sequence[str]
    ) -> list[str]:
        ids_BT = torch.tensor(prompts, device=self._device)
        module: Any = self.model.module
        start = ids_BT.shape[1]
        ends = self.model.generation["eos_token_id"]
        stop = Stop(self.tokenizer, stops, start, len(prompts))
        if not hasattr(module, "generate"):
            module = ByWholePasses(self.model, self.probe)
        out_BT = module.generate(
            input_ids=ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=new,
            do_sample=False,
            num_beams=1,
            stopping_criteria=[stop],
            eos_token_id=ends,
            pad_token_id=ends[0],  # text after an end is cut off
            return_dict_in_generate=False,
            tokenizer=self.tokenizer,  # for the stop strings of generation_config.json
        )
        texts = []
        for row, length in zip(out_BT.tolist(), stop.lengths, strict=True):
            tokens = itertools.takewhile(lambda token: token not in ends, row[start:length])
            text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, list(stops), None))
        return texts


def _score(logits_TV: Tensor, targets: Sequence[int]) -> tuple[float, bool]:
    """Return the sum of the targets' log-probabilities after the last tokens, in float32."""
    logits_NV = logits_TV[-len(targets) :].float()
    targets_N = torch.tensor(targets, device=logits_NV.device)
    chosen_N = torch.log_softmax(logits_NV, -1).gather(-1, targets_N[:, None])[:, 0]
    return float(chosen_N.double().sum()), bool((logits_NV.argmax(-1) == targets_N).all())
