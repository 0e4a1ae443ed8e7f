"""Tasks for the workers: runs of tiny models, and their conversion."""

import json
import shutil
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megasink.checkpoints.model_arguments import plain
from megasink.convert.from_hf import arguments_of
from megasink.convert.model_flags import model_flags
from megasink.megatron.checkpoint_parts import named_parts
from megasink.megatron.model import MegasinkModelBuilder
from megasink.megatron.model_blocks import blocks_in
from megasink.megatron.model_of_arguments import model_config
from megasink.training.load_other_models import accepting_megatrons_checkpoints
from tests.convert.models import ENGINES, MODELS, OWN
from tests.convert.tiny import OTHERS
from tests.distributed.skewed_gates import skew_gates
from tests.distributed.tiny_gpt import skew_sinks
from tests.said import said


def save_run(
    folder: str,
    name: str,
    bf16: bool = False,
    tokenizer: str | None = None,
) -> None:
    """A run folder with one checkpoint of a model with large, different weights everywhere."""
    _, architecture = (MODELS | OTHERS | OWN | ENGINES)[name]
    flags = [*model_flags(architecture), *(["--bf16"] if bf16 else [])]
    args, _ = arguments_of(flags)
    args.vocab_size, args.tokenizer_type = architecture.vocabulary, "NullTokenizer"
    if tokenizer is not None:
        args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", tokenizer
    model = _model_of(args)
    skew_sinks([model])
    skew_gates([model])
    _skew_norms(model)
    model.to(args.params_dtype)
    save_checkpoint(Path(folder), args, model)


def save_checkpoint(folder: Path, args: Namespace, model: Any) -> None:
    """A run folder with these weights, after step 3."""
    checkpoints = folder / "checkpoints"
    checkpoint = checkpoints / "iter_0000003"
    if torch.distributed.get_rank() == 0:
        checkpoint.mkdir(parents=True)
        saved = {key: plain(value) for key, value in vars(args).items()}
        (folder / "config.json").write_text(json.dumps({"arguments": saved}))
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    torch.distributed.barrier()
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.sharded_state_dict(metadata=groups)}
    dist_checkpointing.save(state, str(checkpoint), ("torch_dist", 1))


def layout_config(args: Namespace) -> Any:
    """The model's configuration in the layout that parallel_state holds."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    args.tensor_model_parallel_size = args.expert_tensor_parallel_size = size
    args.tensor_parallel_num_weight_shards = None
    args.expert_tensor_parallel_num_weight_shards = None
    args.pipeline_model_parallel_size = parallel_state.get_pipeline_model_parallel_world_size()
    args.expert_model_parallel_size = parallel_state.get_expert_model_parallel_world_size()
    args.sequence_parallel = bool(args.num_experts) and size > 1
    config = model_config(args)
    config.finalize()
    return config


def _model_of(args: Namespace) -> Any:
    """This rank's stage."""
    return MegasinkModelBuilder(layout_config(args)).build_model(
        ProcessGroupCollection.use_mpu_process_groups(),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def _skew_norms(model: torch.nn.Module) -> None:
    """Weights between 0.6 and 1.9, the same under every layout, in steps that bf16 has."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            steps = torch.arange(parameter.numel()) % 9
            parameter.data.copy_(0.625 + steps / 8)
        if (
            name.endswith(".bias") and parameter.dim() == 1
        ):  # not dt_bias, of which ranks have parts
            steps = torch.arange(parameter.numel()) % 5
            parameter.data.copy_((steps - 2) / 8)

    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # in the order of experts: otherwise few would change
            buffer.copy_(torch.tensor([0.3, -0.2, 0.1, -0.3]))


def round_trip(folder: str, name: str) -> dict[str, Any]:
    """Export, import, export again; compare logits on the way."""
    import transformers

    from megasink.checkpoints.find import find_checkpoint
    from megasink.convert import from_hf, to_hf
    from megasink.convert.verify_logits import Difference, verify_logits

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    root, lines, differences = Path(folder), [], []

    def compare(run: Path, hf: Path) -> Difference:
        architecture = MODELS[name][1]
        return verify_logits(find_checkpoint(run), hf, architecture, None, lines.append)

    source = to_hf.source_of(root / "run", target=MODELS[name][0])
    target = to_hf.export(
        source,
        root / "hf",
        say=lines.append,
        verify=lambda out: differences.append(compare(root / "run", out)),
    )
    from_hf.import_model(
        from_hf.source_of(root / "hf"),
        root / "back",
        say=lines.append,
        verify=lambda out: differences.append(compare(out, root / "hf")),
    )
    back = to_hf.source_of(root / "back", target=MODELS[name][0])
    to_hf.export(back, root / "again", say=lines.append)
    first, second = ((root / x / "model.safetensors").read_bytes() for x in ("hf", "again"))
    return {
        "target": target.name,
        "lines": lines,
        "differences": [vars(d) | {"tolerance": d.tolerance} for d in differences],
        "equal": first == second,
        "architecture": back.model == source.model,
    }


def own_round_trip(folder: str, name: str, bf16: bool = False) -> dict[str, Any]:
    """As `round_trip` for a model of `OWN`, with the logits of the first export alone, and with
    code in its modelling file that must not run on the way back.
    """
    import transformers

    from megasink.convert import from_hf, to_hf
    from megasink.convert.choose_verification import check_export, check_import
    from megasink.convert.megasink_model import FILES
    from megasink.convert.verify_logits import Difference, verify_logits

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    root, lines, differences = Path(folder), [], []
    save_run(str(root / "run"), name, bf16=bf16)
    source = to_hf.source_of(root / "run")

    def compare(out: Path) -> None:
        differences.append(verify_logits(source.location, out, source.model, None, lines.append))

    to_hf.export(source, root / "hf", say=lines.append, verify=compare)
    shutil.copytree(root / "hf", root / "changed")
    code = f"open({str(root / 'ran')!r}, 'w')\n"
    for path in FILES:
        (root / "changed" / path.name).write_text(code)
    imported = from_hf.source_of(root / "changed")
    from_hf.import_model(imported, root / "back", say=lines.append)
    if bf16:  # once is enough
        check_import(imported, None, root / "back", say=lines.append)
        lines.append(said(check_export, source, root / "changed", say=lines.append))
    back = to_hf.source_of(root / "back")
    to_hf.export(back, root / "again", say=lines.append)
    first, second = ((root / x / "model.safetensors").read_bytes() for x in ("hf", "again"))
    difference: Difference = differences[0]
    return {
        **vars(difference),
        "tolerance": difference.tolerance,
        "lines": lines,
        "equal": first == second,
        "architecture": back.model == source.model,
        "ran": (root / "ran").exists(),
    }


def export_only(run: str, output: str, **options: Any) -> None:
    """Write a Hugging Face folder and compare nothing."""
    from megasink.convert.to_hf import export, source_of

    export(source_of(Path(run)), Path(output), say=lambda line: None, **options)


def import_only(hf: str, output: str) -> None:
    """Write a run folder and compare nothing."""
    from megasink.convert.from_hf import import_model, source_of

    import_model(source_of(Path(hf)), Path(output), say=lambda line: None)


def most_held_while_writing(folder: str, count: int) -> int:
    """The most tensors in memory at once while a checkpoint of so many names is written."""
    from megasink.convert.torch_dist_writer import Part, write_checkpoint

    held, most = set(), 0
    parts = [Part(f"weight{i}", (), (), torch.empty(8, device="meta")) for i in range(count)]

    def made():
        nonlocal most
        for i in range(count):
            array = numpy.full(8, i, numpy.float32)
            held.add(i)
            weakref.finalize(array, held.discard, i)
            most = max(most, len(held))
            yield torch.from_numpy(array)
            del array

    Path(folder).mkdir()
    write_checkpoint(Path(folder), parts, made(), {})
    return most


def loaded_weights(checkpoint: str, name: str) -> list[str]:
    """Load a checkpoint as Megatron does, into a model of this layout; what differs, by name."""
    import numpy as np

    from megasink.checkpoints.find import stored_shapes
    from megasink.checkpoints.gpt_as_hybrid import layer_maps, point_at_gpt_keys
    from megasink.convert.megatron_reader import MegatronCheckpoint

    args, _ = arguments_of(model_flags(MODELS[name][1]))
    model = _model_of(args)
    state, keys = {"model": model.sharded_state_dict()}, stored_shapes(Path(checkpoint))
    point_at_gpt_keys(state, layer_maps(model.hybrid_layer_pattern), keys)
    with accepting_megatrons_checkpoints():
        loaded = dist_checkpointing.load(state, checkpoint)
    model.load_state_dict(loaded["model"])
    stored = MegatronCheckpoint(Path(checkpoint))
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    different = []
    for layer in (x for x in model.decoder.layers if hasattr(x.self_attention, "linear_qkv")):
        attention = layer.self_attention
        parts = [("self_attention.linear_proj.weight", 1, attention.linear_proj.weight)]
        mixed = named_parts("self_attention.linear_qkv.weight", attention.linear_qkv.weight)
        for key, axis, tensor in [*parts, *((key, 0, part) for key, part in mixed)]:
            all_ranks = stored.read(f"decoder.layers.{key}", (layer.layer_number - 1,))
            if not np.array_equal(all_ranks.chunk(tp, dim=axis)[rank], tensor.detach()):
                different.append(f"{key} of layer {layer.layer_number}")
    return different


def export_with_a_mistake(run: str, output: str) -> str:
    """Export with the halves of the FFN exchanged; what verification says."""
    from unittest import mock

    from megasink.convert import to_hf
    from megasink.convert.choose_verification import check_export
    from megasink.convert.transforms import GateUp

    source = to_hf.source_of(Path(run))
    right = GateUp.to_hf

    def wrong(self: GateUp, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return right(self, *tensors)[::-1]

    def silent(line: str) -> None:
        pass

    with mock.patch.object(GateUp, "to_hf", wrong):
        return said(
            to_hf.export,
            source,
            Path(output),
            say=silent,
            verify=lambda folder: check_export(source, folder, say=silent),
        )


def export_of_massive_states(run: str, output: str) -> list[str]:
    """Export a run of which any difference is above the usual limit; what is said."""
    from unittest import mock

    from megasink.convert import to_hf, verify_logits
    from megasink.convert.choose_verification import check_export

    source, lines = to_hf.source_of(Path(run)), []
    with mock.patch.object(verify_logits, "TOLERANCE", 0.0):
        to_hf.export(
            source,
            Path(output),
            say=lines.append,
            verify=lambda folder: check_export(source, folder, say=lines.append),
        )
    return lines


def mean_sink_weights(run: str) -> list[float]:
    """The mean attention weight of the sink of every head, layer by layer, on verification's text,
    by the plain definition of attention."""
    from megasink.attention.reference import reference_attention
    from megasink.checkpoints.find import find_checkpoint
    from megasink.checkpoints.load import load_model, load_without_tokenizer
    from megasink.convert.verify_logits import sample_tokens

    tokenizer = load_model(run).tokenizer
    model, _ = load_without_tokenizer(find_checkpoint(Path(run)), torch.float32)
    weights: list[float] = []

    def measure(core: Any, inputs: tuple[Any, ...]) -> None:
        tensors = (x.permute(1, 2, 0, 3) for x in inputs[:3])
        gate = reference_attention(*tensors, variant="sink", sink_H=core.softmax_offset).gate_BHT
        weights.extend((1 - gate).mean(dim=(0, 2)).tolist())

    for block in blocks_in(model):
        block.attention.core_attention.register_forward_pre_hook(measure)
    tokens = sample_tokens(OTHERS["plain-text"][1], tokenizer)
    with torch.no_grad():
        model(tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1), None)
    return weights


def verified_export(run: str, output: str, target: str) -> None:
    """Write a Hugging Face folder whose logits are compared with the run's."""
    from megasink.convert.choose_verification import check_export
    from megasink.convert.to_hf import export, source_of

    def silent(line: str) -> None:
        pass

    source = source_of(Path(run), target=target)
    export(source, Path(output), say=silent, verify=lambda f: check_export(source, f, say=silent))
