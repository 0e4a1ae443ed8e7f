"""Tasks for the workers: hybrid runs of the weights of GPT runs, exports and analyses of both."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.load import load_without_tokenizer
from megasink.megatron.hybrid_pattern import pattern_of
from tests.convert.tasks import save_checkpoint


def save_as_hybrid(run: str, folder: str) -> None:
    """A run folder of the hybrid model with the weights of a GPT model's run."""
    location, root = find_checkpoint(Path(run)), Path(folder)
    saved = json.loads(location.config.read_text())["arguments"]
    saved["hybrid_layer_pattern"] = pattern_of(saved)
    saved["num_layers"] = len(saved["hybrid_layer_pattern"])
    if isinstance(windows := saved.get("window_attn_skip_freq"), list):
        saved["window_attn_skip_freq"] = [each for window in windows for each in (window, 0)]
    described = root.with_suffix(".json")
    described.write_text(json.dumps({"arguments": saved}))
    model, _ = load_without_tokenizer(location._replace(config=described))
    assert isinstance(model, HybridModel)
    save_checkpoint(root, Namespace(**saved), model)


def export_of_both(gpt: str, hybrid: str) -> list[str]:
    """Export a GPT run and the hybrid run that is written of it; names of files that differ."""
    from megasink.convert.choose_verification import check_export
    from megasink.convert.to_hf import export, source_of

    save_as_hybrid(gpt, hybrid)
    sources = [source_of(Path(run)) for run in (gpt, hybrid)]
    assert sources[0].model == sources[1].model
    outputs = [Path(f"{run}-hf") for run in (gpt, hybrid)]
    for source, output in zip(sources, outputs, strict=True):
        export(source, output, say=lambda line: None)
    check_export(sources[1], outputs[1], say=lambda line: None)  # loads the hybrid
    files = [{path.name: path.read_bytes() for path in output.iterdir()} for output in outputs]
    assert files[0].keys() == files[1].keys()
    return [name for name in files[0] if files[0][name] != files[1][name]]


def analyses(run: str, folder: str) -> list[dict[str, Any]]:
    """Return the heads of each layer and every metric, of a run and of its Hugging Face folder."""
    import transformers

    from megasink.analysis.capture.input_samples import Sample
    from megasink.analysis.capture.megatron_model import heads_by_layer
    from megasink.analysis.capture.probe import ProbedModel
    from megasink.analysis.capture.probed_models import open_probe_on
    from megasink.analysis.measure import measure
    from megasink.analysis.options import AnalysisOptions
    from megasink.transformers.decoder_blocks import find_blocks

    ours, _ = load_without_tokenizer(find_checkpoint(Path(run)), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.randint(3, 100, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()
    samples = [Sample(tuple(row), "d", "s") for row in ids]
    found = []
    for model, heads in (
        (ours, heads_by_layer(ours)),
        (theirs.eval(), [block.heads for block in find_blocks(theirs)]),
    ):
        about = {"module": model, "heads": heads, "tokenizer": None, "vocabulary": 101}
        probed = ProbedModel(open_probe_on(model), **about, positions=None, facts={})
        values = measure(probed, samples, AnalysisOptions(seq_length=24)).analysis_values(0)
        numbers = {name: numpy.asarray(value) for name, value in values.overall.items()}
        found.append({"heads": heads, "metrics": numbers})
    return found
