"""Make a run of a checkpoint of Megatron-LM or Megatron-Bridge, without copying its shards.

RUN has config.json and checkpoints/iter_NNNNNNN of links; with an optimizer's state starts.jsonl
and config.toml, for ``--resume``, else flags.txt, for ``--load --finetune``.
"""

import argparse
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megasink
from megasink.attention.variants import Variant, variants
from megasink.checkpoints.damage import TRACKER, checkpoint_path
from megasink.checkpoints.hf_entries import ADOPTED
from megasink.checkpoints.load import check_weights
from megasink.checkpoints.megatron_lm_arguments import read_foreign_arguments
from megasink.checkpoints.model_arguments import plain
from megasink.checkpoints.saved_arguments import describing
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.console.printable import printable
from megasink.convert.from_hf import arguments_of
from megasink.convert.model_flags import as_line
from megasink.convert.safetensors_files import write_json
from megasink.errors import ConfigError, UserError
from megasink.files.output_folder import whole_folder
from megasink.megatron.argument_parser import CPU_DEFAULTS, DEFAULTS, flag_parser, parse_apart
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import REFUSED, given_of, having
from megasink.training.flag_file import refused, toml_lines
from megasink.training.parse_arguments import imply, refusals_of_megatron
from megasink.training.recipes import OF_RUN
from megasink.training.resume_flags import flags_of_words
from megasink.training.run_dir import identity_of

# Refused flags that change a model; the others concern its training.
_OF_THE_MODEL = frozenset(
    """
    mla_down_proj_fusion mtp_hybrid_override_pattern heterogeneous_layers_config_path spec
    experimental_attention_variant moe_latent_size tensor_parallel_num_weight_shards
    expert_tensor_parallel_num_weight_shards moe_single_grouped_weight moe_single_grouped_bias
    """.split()
)
# Fields of Bridge's configuration that no flag sets: (name, the value without effect, the reason).
_WITHOUT_FLAG = (
    ("softmax_scale", None, "megasink scales scores by --kv-channels alone"),
    ("heterogeneous_block_specs", False, "the layers of a model have one shape"),
    ("moe_router_topk_limited_devices", None, "it makes the model depend on the number of ranks"),
)
_MODELS = "megatron.core.models."
# Megatron's own layers, which megasink builds from its own spec.
_SPECS = (
    [f"{_MODELS}hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    [f"{_MODELS}mamba.mamba_layer_specs", "mamba_stack_spec"],
    [f"{_MODELS}mamba.mamba_layer_specs", "mamba_inference_stack_spec"],
    ["local"],
)
# Translated, or megasink's own: where a run saves, how it computes, stores and reports.
_NOT_TAKEN = frozenset(
    {
        *(DEFAULTS.keys() - {"attention_dropout", "hidden_dropout", "tokenizer_type"}),
        *CPU_DEFAULTS,
        *having("place", "written"),
        *"softmax_type attention_output_gate attention_backend use_flash_attn spec".split(),
        *"ckpt_step finetune encoder_seq_length decoder_seq_length encoder_num_layers".split(),
        *"overlap_p2p_comm align_param_gather inference_cuda_graph_scope dataloader_type".split(),
        "exit_signal",
    }
)
# Arguments that Megatron sets to the value of another one: given, they would be refused, or stay
# when the other one changes.
_DERIVED = {
    "lr_decay_iters": "train_iters",
    "lr_decay_samples": "train_samples",
    "start_weight_decay": "weight_decay",
    "end_weight_decay": "weight_decay",
    "eval_global_batch_size": "global_batch_size",
    "eval_micro_batch_size": "micro_batch_size",
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}
# What Megatron's loop adds to the arguments while it trains.
_OF_A_PROCESS = {"iteration", "curr_iteration", "do_train", "do_valid", "do_test"}
_BY_BUCKET = "optimizer.distributed.dp_group_idx"  # states that only the same layout loads
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def adopt(
    steps: Mapping[int, Path], run: Path, tokenizer: Path | None = None
) -> tuple[bool, list[str]]:
    """Write a run of `foreign_checkpoints`; return whether it resumes, and lines about it."""
    step, folder = max(steps.items())
    found = read_foreign_arguments(folder)
    saved = dict(found.values)
    if tokenizer is not None:
        saved |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    left_out = _translate(saved)
    words = {n: w for n, w in _words(saved) if n not in left_out}
    for name in [n for n, flag in words.items() if refused(flag, run)]:
        left_out[name] = f"{' '.join(words.pop(name))}: pass it on the command line"
    args = _parsed(words, saved, folder)
    model = describing() - {"seq_length"}
    of_model = [word for name, flag in words.items() if name in model for word in flag]
    with refusals_of_megatron():
        validated, shape = arguments_of(of_model)
    given = {n: plain(v) for n, v in vars(args).items() if n in words and n not in model}
    arguments = {n: plain(v) for n, v in sorted(vars(validated).items())} | given
    check_weights(arguments, folder)
    if without := _no_optimizer(folder, found.writer, args):
        left_out["optimizer"] = without
    config: dict[str, Any] = {"arguments": arguments, "identity": identity_of(args)}
    if without:
        config |= {"identity": shape, "converted_from": found.writer}
    origin = {"from": str(folder), "writer": found.writer, "left_out": [*left_out.values()]}
    config |= {ADOPTED: origin, "versions": {"megasink": megasink.__version__}}
    with whole_folder(run) as partial:
        for number, path in steps.items():
            _link(path, checkpoint_path(partial / "checkpoints", number))
        (partial / "checkpoints" / TRACKER).write_text(str(step))
        if without:
            flags = [*of_model, *words.get("tokenizer_model", ())]
            (partial / "flags.txt").write_text(as_line(flags))
        else:
            _write_start(partial, run, [w for flag in words.values() for w in flag], saved)
        write_json(partial / "config.json", config)
    known = _OF_A_PROCESS | vars(validated).keys() | describing()
    unknown = [n for n, v in found.values.items() if v and n not in known]
    return not without, [*_about(saved, left_out, sorted([*found.unread, *unknown]))]


def _parsed(words: Mapping[str, list[str]], saved: Mapping[str, Any], folder: Path) -> Namespace:
    """Parse flags, and check that they mean the saved values."""
    args = parse_apart([word for flag in words.values() for word in flag])
    # Megatron's validation takes the only value of a list out of it.
    if changed := [n for n in words if plain(getattr(args, n)) not in (saved[n], [saved[n]])]:
        raise ConfigError(
            f"{flag_of(n)} {saved[n]!r}: this version of Megatron parses it as {getattr(args, n)!r}"
            for n in changed
        )
    imply(args)
    if missing := [flag_of(name) for name in having("needed") if not getattr(args, name)]:
        raise UserError(f"{folder} lacks the arguments {', '.join(missing)}")
    return args


def _no_optimizer(folder: Path, writer: str, args: Namespace) -> str | None:
    """Return why a run cannot resume from a checkpoint; None if it can."""
    keys = read_metadata(folder).state_dict_metadata
    if writer != "Megatron-LM":
        return f"the optimizer state, which {writer} stores in another format"
    if not any(key.startswith("optimizer.") for key in keys):
        return "the optimizer state, which is not in the checkpoint"
    if not args.hybrid_layer_pattern and any(key.startswith(_BY_BUCKET) for key in keys):
        return (
            "the optimizer state, which is stored by gradient bucket, not by parameter: to resume, "
            "save again with --dist-ckpt-optim-fully-reshardable"
        )
    return None


def _translate(saved: dict[str, Any]) -> dict[str, str]:
    """Replace Megatron's arguments in place; return the reasons of those left out, by name."""
    equal = [name for name, source in _DERIVED.items() if saved.get(name) == saved.get(source)]
    saved |= dict.fromkeys(equal)
    if not saved.get("group_query_attention"):
        saved["num_query_groups"] = None  # Megatron's is the number of heads
    if saved.get("spec") in _SPECS:
        saved["spec"] = None
    rows = (*_rows(of_model=True), *_WITHOUT_FLAG)
    if problems := [f"{flag} {value}: {why}" for flag, value, why in given_of(saved, rows)]:
        raise ConfigError(problems)
    left_out = {}
    for row in _rows(of_model=False):
        for flag, value, why in given_of(saved, (row,)):
            if row[0] not in ("attention_output_gate", "spec"):
                left_out[row[0]] = f"{flag} {value}: {why}"
    pattern = saved.get("hybrid_layer_pattern") or saved.get("hybrid_override_pattern")
    saved |= {"hybrid_override_pattern": None, "hybrid_layer_pattern": pattern}
    saved |= {n: _DTYPES[v] for n, v in saved.items() if isinstance(v, str) and v in _DTYPES}
    if pattern:
        saved["num_layers"] = None
    if "attention_variant" not in saved:  # else a checkpoint of megasink
        saved |= _variant(saved)
    return left_out


def _rows(*, of_model: bool) -> tuple[tuple[str, Any, str], ...]:
    return tuple(row for row in REFUSED["always"] if (row[0] in _OF_THE_MODEL) == of_model)


def _variant(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return megasink's options for Megatron's sinks and output gates, without a balance loss."""
    kind, gated = (
        saved.get("softmax_type") or Variant.softmax_type,
        saved.get("attention_output_gate"),
    )
    record = next((r for r in variants() if r.softmax_type == kind), None)
    if record is None or (gated and kind != Variant.softmax_type):
        gate = " with --attention-output-gate" if gated else ""
        raise ConfigError(f"--softmax-type {kind}{gate}: no attention variant computes this")
    options = {"attention_variant": record.name, "head_balance_coeff": 0.0}
    if gated:
        options |= {"attention_variant": "gated", "gate_granularity": "elementwise"}
    return options


def _words(saved: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, words) for each argument that differs from megasink's default."""
    parser, done = flag_parser(), set(_NOT_TAKEN)
    for action in parser._actions:
        name, value = action.dest, saved.get(action.dest)
        if name in done or value is None or value == plain(parser.get_default(name)):
            continue
        flag = next((text for text in action.option_strings if text.startswith("--")), None)
        if flag is None:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            words = [flag if value else next(t for t in action.option_strings if t[:5] == "--no-")]
        elif action.nargs == 0:
            if value != action.const:
                continue
            words = [flag]
        elif isinstance(value, list) and action.nargs is not None:
            words = [flag, *map(str, value)]
        elif isinstance(value, list):
            text = ",".join(map(str, value))
            words = [flag, text if name == "window_size" else f"[{text}]"]
        else:
            words = [flag, str(value)] if str(value)[:1] != "-" else [f"{flag}={value}"]
        done.add(name)
        yield name, words


def _link(folder: Path, at: Path) -> None:
    """Link every file of a checkpoint: the run may move, and the checkpoint may not."""
    at.mkdir(parents=True)
    for path in folder.iterdir():
        (at / path.name).symlink_to(path)


def _write_start(partial: Path, run: Path, words: list[str], saved: Mapping[str, Any]) -> None:
    """Write the flags of the checkpoint as those of the run's last start."""
    ranks = saved.get("world_size")
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["megasink train", "--run-dir", str(run), *words],
        "world_size": ranks if type(ranks) is int else 0,
        "resumed_from": None,
    }
    (partial / "starts.jsonl").write_text(f"{json.dumps(start)}\n")
    flags = {"about": f"the flags of {printable(run.name)}"} | flags_of_words(words)
    (partial / OF_RUN).write_text("".join(f"{line}\n" for line in toml_lines(flags)))


def _about(
    saved: Mapping[str, Any], left_out: Mapping[str, str], unknown: list[str]
) -> Iterator[str]:
    """Yield lines about the tokenizer, and about what the run does not have."""
    kind, path = saved.get("tokenizer_type"), saved.get("tokenizer_model")
    if kind == "HuggingFaceTokenizer":
        there = "found" if path and Path(path).is_dir() else "not found here: pass --tokenizer"
        yield f"tokenizer: {path} ({there})"
    else:
        yield f"tokenizer: {kind} (to encode text, pass a Hugging Face folder with --tokenizer)"
    yield from (f"left out: {line}" for line in left_out.values())
    if unknown:
        yield f"ignored, because this version of Megatron does not know them: {', '.join(unknown)}"
