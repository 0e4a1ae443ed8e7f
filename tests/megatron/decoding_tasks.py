"""Tasks for the workers: generate with the cache, and by recomputing the whole prefix.

Shapes: B sequences, S tokens, V vocabulary.
"""

import dataclasses
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megasink.megatron import inference_guard
from megasink.megatron.decoding import generate
from megasink.megatron.inference_guard import dynamic_inference_problems
from megasink.megatron.model import MegasinkModelBuilder
from megasink.megatron.sampling import Sampling
from tests.distributed import tiny_gpt
from tests.distributed.tiny_gpt import VOCABULARY
from tests.said import said

GREEDY = Sampling(temperature=0)


def model_of(**options: Any) -> Any:
    """This rank's stage of a tiny GPT with skewed sinks, its weights those of every layout."""
    config = tiny_gpt.model_config(**options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    return model.eval()


def cached_and_recomputed(
    prompts: list[list[int]], new_tokens: int, **options: Any
) -> dict[str, Any]:
    """Greedy tokens and logits of a batch with the cache, of each prompt alone with the cache, and
    of each prompt alone with the whole prefix recomputed for every token.
    """
    model = model_of(**options)
    report: dict[str, Any] = {"batch logits": [[] for _ in prompts], "recomputed logits": []}
    position = [min(map(len, prompts))]

    def collect(logits_BV: Tensor) -> None:
        for row, prompt in enumerate(prompts):
            if len(prompt) <= position[0] < len(prompt) + new_tokens:
                report["batch logits"][row].append(logits_BV[row].float().clone())
        position[0] += 1

    arguments = {"max_new_tokens": new_tokens, "sampling": GREEDY, "vocabulary": VOCABULARY}
    report["batch"] = generate(model, prompts, **arguments, on_logits=collect).tokens
    report["alone"] = [generate(model, [p], **arguments).tokens[0] for p in prompts]
    recomputed = [recompute(model, prompt, new_tokens) for prompt in prompts]
    report["recomputed"] = [tokens for tokens, _ in recomputed]
    report["recomputed logits"] = [logits for _, logits in recomputed]
    return report


@torch.no_grad()
def recompute(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Greedy decoding without a cache, through Megatron's training schedule."""
    tokens, logits = list(prompt), []
    for _ in range(new_tokens):
        text_1S = torch.tensor([tokens])
        positions_1S = torch.arange(len(tokens))[None]

        def forward(_: Any, model: Any, text: Tensor = text_1S, at: Tensor = positions_1S) -> Any:
            output = model(text, at, None, runtime_gather_output=True)
            return output, lambda logits_1SV: (logits_1SV.sum(), {"logits": logits_1SV})

        (found,) = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(()),
            model=model,
            num_microbatches=1,
            seq_length=len(tokens),
            micro_batch_size=1,
            forward_only=True,
        ) or [None]
        chosen = torch.zeros(1, dtype=torch.long)
        if found is not None:
            logits.append(found["logits"][0, -1].float().clone())
            chosen = logits[-1].argmax()[None]
        torch.distributed.broadcast(
            chosen,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        tokens.append(int(chosen))
    return tokens[len(prompt) :], logits


def dynamic_problems(device: str, **options: Any) -> list[str]:
    """Why a model cannot run under dynamic inference."""
    return dynamic_inference_problems(tiny_gpt.model_config(**options).transformer, device)


def dynamic_problems_of_an_unknown_option() -> list[str]:
    """The same, of a configuration with an option and a variant that nobody has thought of."""

    @dataclasses.dataclass
    class Planted:
        planted_slope: float = 0.0

    config = tiny_gpt.model_config().transformer
    config.attention_variant = "planted"
    config.planted_slope = 0.5
    with mock.patch.object(inference_guard, "OPTIONS", (*inference_guard.OPTIONS, Planted)):
        return dynamic_inference_problems(config, "cuda")


@torch.no_grad()
def refusal_of_another_state(**options: Any) -> str:
    """What is said of a token after five, with the state of two."""
    mixer = model_of(pattern="G-*-", **options).decoder.layers[0].self_attention
    context = StaticInferenceContext(1, 8)

    def step(tokens: int) -> None:
        mixer(torch.ones(tokens, 1, tiny_gpt.HIDDEN), None, inference_context=context)

    step(2)
    context.sequence_len_offset = 5
    return said(lambda: step(1))


def refusals() -> dict[str, str]:
    """{kind of forward pass: the message of its refusal, or "" where there is none}."""
    model = model_of()
    tokens = torch.tensor([[1, 2, 3]])
    inputs = (tokens, torch.arange(3)[None], None)

    found = {"training": said(lambda: model(*inputs))}
    static = StaticInferenceContext(1, 8)
    found["static"] = said(lambda: model(*inputs, inference_context=static))
    dynamic = mock.Mock(is_dynamic_batching=lambda: True)
    found["dynamic"] = said(lambda: model(*inputs, inference_context=dynamic))
    model.config.flash_decode = True
    found["flash decode"] = said(lambda: model(*inputs, inference_context=static))
    model.config.flash_decode = False
    for option, value in (("sequence_parallel", True), ("context_parallel_size", 2)):
        before = getattr(model.config, option)
        setattr(model.config, option, value)
        found[option.removesuffix("_size").replace("_", " ")] = said(
            lambda: generate(model, [[1]], 1, GREEDY, vocabulary=VOCABULARY)
        )
        setattr(model.config, option, before)
    return found


def through_megatrons_engine(
    prompts: list[list[int]], new_tokens: int, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of Megatron's own static engine, and of ours, for a batch."""
    from megatron.core.inference.engines.static_engine import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )

    class Numbers:
        """A tokenizer of texts that are numbers."""

        eod, bos, vocab_size = VOCABULARY - 1, None, VOCABULARY

        def tokenize(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

        def detokenize(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    model = model_of(**options)
    event = mock.Mock(return_value=mock.Mock(elapsed_time=lambda other: 1.0))
    with (  # the CPU platform has no events, and generators on the CPU only
        mock.patch("torch.cuda.Event", event),
        mock.patch("torch.Generator", return_value=torch.Generator()),
        InferenceMode.active(),
    ):
        wrapper = GPTInferenceWrapper(model, StaticInferenceContext(len(prompts), 32))
        controller = TextGenerationController(wrapper, Numbers())
        engine = StaticInferenceEngine(controller, legacy=True)
        answers = engine.generate(
            prompts=[" ".join(map(str, prompt)) for prompt in prompts],
            sampling_params=SamplingParams(top_k=1, num_tokens_to_generate=new_tokens),
        )
    ours = generate(
        model, prompts, new_tokens, GREEDY, vocabulary=VOCABULARY, ends=[Numbers.eod]
    ).tokens
    return [answer.generated_tokens.tolist() for answer in answers], ours
