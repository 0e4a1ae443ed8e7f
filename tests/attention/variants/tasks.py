"""Tasks for the workers: a variant trained, saved, analyzed, generated with and converted.

Shapes: L layers, H query heads, N samples.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.utils import unwrap_model
from rich.console import Console
from torch import Tensor

from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.megatron_model import MegatronProbe
from megasink.analysis.measure import Recorder, run
from megasink.analysis.options import AnalysisOptions
from megasink.attention import attention
from megasink.attention.variants import Variant, register, variant_registry
from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.load import load_without_tokenizer
from megasink.convert import from_hf, to_hf
from megasink.convert.model_flags import model_flags
from megasink.convert.verify_logits import verify_logits
from megasink.errors import UserError
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.decoding import generate
from megasink.megatron.inference_guard import dynamic_inference_problems
from tests.convert.tasks import layout_config, save_checkpoint
from tests.convert.tiny import model as architecture
from tests.distributed import observing_tasks, tiny_gpt
from tests.distributed.skewed_gates import skew_gates
from tests.distributed.tiny_gpt import skew_sinks
from tests.documented import register_variant
from tests.megatron.decoding_tasks import GREEDY, recompute
from tests.said import said


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """While the body runs, there is the variant of CONTRIBUTING.md, outside of the package."""
    with mock.patch.dict(variant_registry._VARIANTS):
        register_variant()
        yield


def skew(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Large, different values wherever a variant or gate starts with equal ones."""
    skew_gates(skew_sinks(models))
    for module in (m for model in models for m in model.modules()):
        sink_G = getattr(module, "group_sink", None)
        if isinstance(module, CoreAttention) and sink_G is not None:
            index_G = len(sink_G) * module.tp_group.rank() + torch.arange(len(sink_G))
            sink_G.data.copy_(module.layer_number - 3.0 * index_G)
    return models


def trained(folder: str, kind: str) -> dict[str, Any]:
    """Two steps of a tiny GPT, of which the second one's weights are saved as a run."""
    with registered():
        flags = model_flags(architecture(attention=kind, vocabulary=128))
        args, _ = from_hf.arguments_of(flags)
        args.vocab_size, args.tokenizer_type = 128, "NullTokenizer"
        config = layout_config(args)
        config.pre_wrap_hooks = [skew]
        models = tiny_gpt.build(config)
        optimizer, scheduler = tiny_gpt.optimizer_of(config, models, False)
        dp = parallel_state.get_data_parallel_world_size()
        rows = tiny_gpt.MICROBATCH * tiny_gpt.MICROBATCHES
        init_num_microbatches_calculator(0, None, rows, tiny_gpt.MICROBATCH, dp)
        config.transformer.grad_scale_func = optimizer.scale_loss
        tiny_gpt.run_step(models, optimizer, 0)
        tiny_gpt.statistics(config.transformer)
        before = [p.detach().clone() for p in unwrap_model(models)[0].parameters()]
        assert optimizer.step()[0]
        after = unwrap_model(models)[0].parameters()
        assert not all(map(torch.equal, before, after))
        scheduler.step(rows)
        with _first_key_weights(models) as weights:
            tiny_gpt.run_step(models, optimizer, 1)
        found = tiny_gpt.statistics(config.transformer)
        save_checkpoint(Path(folder), args, unwrap_model(models)[0])
    first_LH = torch.stack([torch.stack(weights[layer]).mean(0) for layer in sorted(weights)])
    return {"importance": found.importance_LH, "first key": first_LH}


@contextlib.contextmanager
def _first_key_weights(models: list[Any]) -> Iterator[dict[int, list[Tensor]]]:
    """{layer: mean weight of the first key [H] in each microbatch} of what the body runs."""
    found: dict[int, list[Tensor]] = {}

    def measure(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        tensors = (named[n].detach().permute(1, 2, 0, 3) for n in ("query", "key", "value"))
        gate_BHT = attention(*tensors).gate_BHT
        assert gate_BHT is not None
        found.setdefault(core.layer_number, []).append(1 - gate_BHT.mean((0, 2)))

    cores = [m for model in models for m in model.modules() if isinstance(m, CoreAttention)]
    hooks = [core.register_forward_pre_hook(measure, with_kwargs=True) for core in cores]
    yield found
    for hook in hooks:
        hook.remove()


def used(folder: str, kind: str) -> dict[str, Any]:
    """What analysis, generation and conversion make of the run that `trained` saved."""
    root = Path(folder)
    with registered():
        model, _ = load_without_tokenizer(find_checkpoint(root / "run"))
        prompt = tiny_gpt.batch(5, 0)["tokens"][0, :9].tolist()
        cached = generate(model, [prompt], 4, GREEDY, vocabulary=tiny_gpt.VOCABULARY).tokens[0]
        return {
            **_analyzed(model),
            "generated": cached == recompute(model, prompt, 4)[0],
            "export": _round_trip(root),
            "dynamic": dynamic_inference_problems(model.config, "cuda"),
        }


def _analyzed(model: Any) -> dict[str, Tensor]:
    """As `megasink analyze`, on the tokens of the last step."""
    batches = [tiny_gpt.batch(1, index)["tokens"] for index in range(tiny_gpt.MICROBATCHES)]
    samples = [Sample(tuple(row.tolist()), "last step", "-") for row in torch.cat(batches)]
    heads = [model.config.num_attention_heads] * model.config.num_layers
    recorder = Recorder(heads, ("importance", "slot_alpha", "awft"))
    with MegatronProbe(model, recorder) as probe:
        found = run(
            probe,
            recorder,
            samples,
            AnalysisOptions(batch_size=4, loss=False),
            console=Console(quiet=True),
        )
    assert found is not None
    values = found.analysis_values(seed=0).overall
    names = {"importance": "importance", "slot": "slot_alpha", "first key": "awft"}
    return {name: values[metric] for name, metric in names.items()}


def _round_trip(root: Path) -> dict[str, Any] | str:
    """Export, import and export again; or the refusal."""
    differences = []

    def silent(line: str) -> None:
        pass

    try:
        source = to_hf.source_of(root / "run")
        to_hf.export(
            source,
            root / "hf",
            say=silent,
            verify=lambda out: differences.append(
                verify_logits(source.location, out, source.model, None, silent)
            ),
        )
    except UserError as error:
        return str(error)
    from_hf.import_model(from_hf.source_of(root / "hf"), root / "back", say=silent)
    to_hf.export(to_hf.source_of(root / "back"), root / "again", say=silent)
    first, second = ((root / x / "model.safetensors").read_bytes() for x in ("hf", "again"))
    (difference,) = differences
    return {
        "logits": difference.logits,
        "tolerance": difference.tolerance,
        "generated": difference.generated,
        "equal": first == second,
    }


def logged_sinks() -> Tensor:
    """[L, H]: what a step that is observed logs of a model with sinks per group."""
    with registered(), mock.patch.object(tiny_gpt, "skew_sinks", skew):
        found = observing_tasks.observed_step(attention_variant="sink-per-group")
    logged: Tensor = found["sink"]
    return logged


def unstated() -> dict[str, Any]:
    """What is refused of a variant whose record says no more than it must."""
    with mock.patch.dict(variant_registry._VARIANTS):

        def attend(_: Any, parameters: Any, *args: Any, with_gate: bool, **options: Any) -> Any:
            return attention(*args, with_gate=False, **options)

        register(Variant(name="mystery", description="-", attend=attend))
        refused: dict[str, Any] = {
            "balance loss": said(tiny_gpt.model_config, attention_variant="mystery")
        }
        options: dict[str, Any] = {"attention_variant": "mystery", "head_balance_coeff": 0.0}
        (model,) = tiny_gpt.build(tiny_gpt.model_config(**options))
        gpt = unwrap_model(model)
        refused["analysis"] = said(MegatronProbe, gpt.eval(), Recorder([4, 4]), set())
        data = tiny_gpt.batch(0, 0)
        refused["no gate"] = said(gpt, data["tokens"], data["position_ids"], None)
        refused["inference"] = dynamic_inference_problems(gpt.config, "cuda")
        return refused


def refused_layout() -> str:
    """Groups that the tensor-parallel ranks do not divide."""
    with registered():
        options: dict[str, Any] = {"attention_variant": "sink-per-group", "num_query_groups": 1}
        return said(tiny_gpt.model_config, **options)


def unregistered(run_folder: str) -> str:
    """What reading a run says whose variant no module of this process has registered."""
    return said(lambda: load_without_tokenizer(find_checkpoint(Path(run_folder))))
