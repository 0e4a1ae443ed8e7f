"""Make loaded models ready for probing, and identify them."""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from megasink.analysis.capture.input_samples import Sample, data_hash
from megasink.analysis.capture.probe import OpenProbe, ProbedModel
from megasink.analysis.metrics.registry import measured
from megasink.analysis.options import AnalysisOptions
from megasink.checkpoints.hf_entries import with_ends
from megasink.errors import ConfigError, UserError
from megasink.transformers.decoder_blocks import decoder_config, find_blocks
from megasink.transformers.model_identity import model_identity

if TYPE_CHECKING:
    from megasink.checkpoints.load import LoadedModel


def open_probe_on(model: Any) -> OpenProbe:
    """Return the function that opens a probe on a model of any kind."""
    if isinstance(model, ProbedModel):
        return model.open_probe
    if hasattr(model, "tokenizer"):  # a result of load_model or load_run
        model = model.model
    if "megatron.core.models.gpt" in sys.modules:
        from megatron.core.models.common.language_module.language_module import LanguageModule

        from megasink.analysis.capture.megatron_model import MegatronProbe

        if isinstance(model, LanguageModule):
            return partial(MegatronProbe, model)
    if isinstance(model, PreTrainedModel):
        from megasink.analysis.capture.transformers_model import TransformersProbe

        return partial(TransformersProbe, model)
    raise UserError(
        f"{type(model).__name__} is neither a transformers model nor a Megatron GPTModel: unwrap "
        "it first (torch.compile, adapters, parallel wrappers)"
    )


def of_transformers(model: PreTrainedModel, tokenizer: Any, name: str) -> ProbedModel:
    """Return a model of transformers, ready for probing."""
    from megasink.analysis.capture.transformers_model import model_problems

    problems = model_problems(model)
    if problems:
        raise ConfigError(problems)
    config = decoder_config(model)
    return ProbedModel(
        open_probe_on(model),
        module=model,
        heads=[block.heads for block in find_blocks(model)],
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None),
        generation=with_ends(model.generation_config.to_dict(), tokenizer),
        facts={
            "name": name,
            "kind": type(model).__name__,
            "attention": config._attn_implementation,
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": model.num_parameters(),
        },
    )


def of_run(loaded: "LoadedModel", name: str, *, yarn: float | None = None) -> ProbedModel:
    """Return the model of a run, ready for probing."""
    from megasink.analysis.capture.megatron_model import heads_by_layer
    from megasink.checkpoints.load import model_facts

    trained = loaded.args
    facts = model_facts(trained, loaded.model, loaded.iteration, name)
    if yarn is not None:
        facts["kind"] += f", YaRN x{yarn:g}"  # part of an analysis's identity
    return ProbedModel(
        open_probe_on(loaded.model),
        module=loaded.model,
        heads=heads_by_layer(loaded.model),
        tokenizer=loaded.tokenizer,
        vocabulary=loaded.vocabulary,
        positions=trained.max_position_embeddings,
        first=(trained.sink_token_id,) if trained.sink_token else (),
        generation=loaded.generation,
        replaced_at=tuple(trained.replace_tokens_at or ()),
        replaced_with=trained.replace_tokens_with,
        facts=facts,
    )


def identity(model: ProbedModel, data: Any, **settings: Any) -> dict[str, Any]:
    """Return the identity of a measurement: every setting that can change a bit of the results."""
    return {
        "model": model.facts["kind"],
        **model_identity(model.module, model.tokenizer, data),
        "dtype": model.facts["dtype"],
        "attention": model.facts["attention"],
        "device": model.device.type,
        **settings,
    }


def analysis_identity(
    model: ProbedModel,
    samples: Sequence[Sample],
    options: AnalysisOptions,
    metrics: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the identity of metrics of samples."""
    flags = options.by_flag("data", "batch_size", "positions", "columns", "loss")
    names = sorted(measured(metrics, options.metrics))
    return identity(model, data_hash(samples), **flags, metrics=names)
