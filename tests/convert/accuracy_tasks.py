"""Tasks for the workers: released configurations, little memory, how far two sides are apart."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {k: _wide(v) for k, v in (kwargs or {}).items()}
        return func(*map(_wide, args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def errors(folder: str, config: dict[str, Any]) -> dict[str, float]:
    """Import as `import_released`; root mean square errors of both sides in float32."""
    import transformers

    from megasink.checkpoints.find import find_checkpoint
    from megasink.checkpoints.load import load_without_tokenizer
    from megasink.convert.verify_logits import megatron_logits

    import_released(folder, config)
    vocabulary = config["vocab_size"]
    tokens = torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(1234))
    ours, _ = load_without_tokenizer(find_checkpoint(Path(folder) / "run"), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        Path(folder) / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if theirs._can_set_experts_implementation():
        theirs.set_experts_implementation("eager")
    with torch.no_grad():
        found = {"ours": megatron_logits(ours, tokens, vocabulary), "theirs": theirs(tokens).logits}
        with _Float64():
            exact = theirs.double()(tokens).logits
    return {side: float((x - exact).square().mean().sqrt()) for side, x in found.items()}


def import_released(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Import a random model that transformers made and saved from a config.json; the difference."""
    import transformers

    from megasink.checkpoints.find import find_checkpoint
    from megasink.convert import from_hf
    from megasink.convert.verify_logits import verify_logits

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(5)
    hf, run = Path(folder) / "hf", Path(folder) / "run"
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms are zeros and ones.
            parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith("A_log"):
                # A state of one token alone can be nearly 0, and its norm enlarges the rounding.
                parameter.uniform_(-4, -2)
    model.save_pretrained(hf)
    (hf / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    source = from_hf.source_of(hf)
    from_hf.import_model(source, run, say=lambda line: None)
    location = find_checkpoint(run)
    difference = verify_logits(location, hf, source.model, None, lambda line: None)
    return vars(difference) | {"tolerance": difference.tolerance}


def import_and_export(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """As `import_released`; also "target" of the next export, and "differ": its other weights."""
    from safetensors.torch import load_file

    from megasink.convert import to_hf

    report = import_released(folder, config)
    root = Path(folder)
    source = to_hf.source_of(root / "run")
    target = to_hf.export(source, root / "again", say=lambda line: None)
    first, again = (load_file(root / name / "model.safetensors") for name in ("hf", "again"))
    names = first.keys() | again.keys()
    different = [n for n in names if n not in again or not torch.equal(first[n], again[n])]
    return report | {"target": target.name, "differ": sorted(different)}


def instruments(folder: str) -> dict[str, str | None]:
    """Return the refusal of each instrument for a folder in transformers, None if it is right."""
    import copy

    import transformers

    from tests.transformers.test_every_type import CHECKS, refusal

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return {check.__name__: refusal(check, copy.deepcopy(model), model) for check in CHECKS}


def accuracy(folder: str) -> dict[str, str]:
    """Export folder/run; a row of benchmarks/convert_accuracy.py."""
    from megasink.convert import to_hf, verify_logits

    source = to_hf.source_of(Path(folder) / "run")
    hf = Path(folder) / "hf"
    target = to_hf.export(source, hf, say=lambda line: None)
    tokens = verify_logits.sample_tokens(source.model, None)
    vocabulary = source.model.vocabulary
    logits: dict[tuple[str, torch.dtype], tuple[torch.Tensor, list[int]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits["megatron", dtype] = verify_logits._megatron(
            source.location, dtype, tokens, vocabulary
        )
        logits["hf", dtype] = verify_logits._transformers(hf, dtype, tokens)
    full, half = (
        verify_logits.difference(
            logits["megatron", dtype][0],
            logits["hf", dtype][0],
            logits["megatron", dtype][1],
            logits["hf", dtype][1],
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    exact = logits["megatron", torch.float32][0]
    errors = [
        float((logits[side, torch.bfloat16][0] - exact).abs().mean()) for side in ("megatron", "hf")
    ]
    return {
        "target": target.name,
        "float32": f"{full.logits:.1e} of {full.largest:.1f}",
        "bfloat16": f"{half.logits:.2f}",
        "errors": ", ".join(f"{error:.4f}" for error in errors),
        "same": f"{full.argmax:.1%}, {half.argmax:.1%}",
    }


def convert_in_little_memory(source: str, output: str, damaged: bool) -> dict[str, Any]:
    """Convert with too little free memory; flip a bit before verification if asked to."""
    from unittest import mock

    from megasink.convert import choose_verification, from_hf, to_hf
    from megasink.convert.choose_verification import check_export, check_import
    from megasink.errors import UserError

    lines: list[str] = []
    exports = (Path(source) / "checkpoints").is_dir()
    pattern = "*.safetensors" if exports else "checkpoints/*/*.distcp"

    def check(folder: Path) -> None:
        if damaged:
            (path,) = folder.glob(pattern)
            content = bytearray(path.read_bytes())
            content[-100 if exports else 5000] ^= 1  # of the last weight, or the first
            path.write_bytes(content)
        if exports:
            check_export(run, folder, say=lines.append)
        else:
            check_import(hf, None, folder, say=lines.append)

    message = None
    with mock.patch.object(choose_verification, "fits_in_memory", return_value=False):
        try:
            if exports:
                run = to_hf.source_of(Path(source))
                to_hf.export(run, Path(output), say=lines.append, verify=check)
            else:
                hf = from_hf.source_of(Path(source))
                from_hf.import_model(hf, Path(output), say=lines.append, verify=check)
        except UserError as error:
            message = str(error)
    return {"lines": lines, "message": message}


def logits_with(run: str, **arguments: Any) -> tuple[Any, Any]:
    """The logits of a run as it is, and with other arguments in its config.json."""
    from megasink.checkpoints.find import find_checkpoint
    from megasink.checkpoints.load import load_without_tokenizer

    found: list[Any] = []
    for changed in ({}, arguments):
        path = Path(run) / "config.json"
        config = json.loads(path.read_text())
        config["arguments"] |= changed
        path.write_text(json.dumps(config))
        model, _ = load_without_tokenizer(find_checkpoint(Path(run)))
        tokens = torch.arange(40)[None] % 37
        with torch.no_grad():
            found.append(model(tokens, torch.arange(40)[None], None))
    return found[0], found[1]
