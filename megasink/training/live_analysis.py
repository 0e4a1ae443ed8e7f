"""Run `megasink analyze` on the model during training, at evaluations (--analyze-interval).

Training is not affected: samples do not come from the data iterators, the forward pass is in
evaluation mode and draws no random numbers, and no gradient, weight or buffer changes.
"""

import contextlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from rich.console import Console

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.identity import identity
from megasink.analysis.capture.inputs import SHORTEST, Sample
from megasink.analysis.capture.loaded import open_probe_on
from megasink.analysis.capture.megatron_model import heads_by_layer
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.samples import Inputs
from megasink.analysis.capture.shards import PartialFolder
from megasink.analysis.measure import measure
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.results import Results
from megasink.analysis.run import run_facts
from megasink.analysis.write import write_numbers
from megasink.checkpoints.intact import checkpoint_path
from megasink.checkpoints.model_facts import model_facts
from megasink.errors import UserError
from megasink.training.checks.vocabulary import replacement_of
from megasink.training.dataset import bytes_per_token
from megasink.training.replacing import replaced_places
from megasink.training.run_dir import LIVE

Provider = Callable[..., Any]


class LiveAnalysis:
    """Analyze the model of a run at the requested steps."""

    def __init__(self, args: Namespace):
        self._args = args
        self._folder = Path(args.run_dir, LIVE)
        self._validation: Any = None
        self._samples: list[Sample] | None = None
        self._latest = 0

    def listening(self, provider: Provider) -> Provider:
        """Wrap a datasets provider to keep its validation set for analysis."""

        def listen(*args: Any, **kwargs: Any) -> Any:
            sets = provider(*args, **kwargs)
            self._validation = sets[1]
            return sets

        listen.is_distributed = True  # type: ignore[attr-defined]  # as provider is
        return listen

    def __call__(self, model: list[torch.nn.Module], iteration: int) -> Results | None:
        """Analyze if this step is due. Call on every rank.

        Returns:
            the contents of results.json, on the last rank, which writes it.
        """
        args = self._args
        due = iteration % args.analyze_interval == 0 or iteration == args.train_iters
        if not due or iteration == self._latest:
            return None
        self._latest = iteration
        if self._samples is None:
            self._samples = validation_samples(self._validation, args)
        ranks = _ReplicaRanks()
        output = checkpoint_path(self._folder, iteration)
        if ranks.rank == 0:
            shutil.rmtree(output, ignore_errors=True)  # left from an earlier run of this step
        gpt: Any = unwrap_model(model)[0]
        with _evaluating(gpt):
            return self._analyze(gpt, iteration, output, ranks)

    def _analyze(
        self, gpt: Any, iteration: int, output: Path, ranks: "_ReplicaRanks"
    ) -> Results | None:
        args, samples = self._args, self._samples
        assert samples is not None
        options = AnalysisOptions(
            data=("validation",),
            seq_length=args.seq_length,
            max_samples=args.analyze_samples,
            batch_size=args.micro_batch_size,
            seed=args.seed,
        )
        model = ProbedModel(
            open_probe_on(gpt),
            module=gpt,
            heads=heads_by_layer(gpt),
            tokenizer=None,
            vocabulary=args.padded_vocab_size,
            positions=args.max_position_embeddings,
            facts=model_facts(args, gpt, iteration, f"step {iteration}"),
        )
        partial = PartialFolder(output / "partial", identity(model, samples, options))
        try:
            measurements = measure(
                model,
                samples,
                options,
                token_bytes=bytes_per_token(args),
                partial=partial,
                ranks=ranks,
                console=Console(quiet=True),
            )
            if measurements is None:
                return None
            inputs = Inputs(samples, args.seq_length, replacement_of(args))
            run = run_facts(model, inputs, options)
            results = write_numbers(output, measurements, samples, model.facts, run)
            partial.remove()
        except UserError as error:
            if not ranks.are_done:
                raise
            # Every rank continues: a failed analysis must not stop training.
            print(f"megasink: warning: step {iteration} was not analyzed: {error}", file=sys.stderr)
            return None
        return results


class _ReplicaRanks(Ranks):
    """Data-parallel ranks, already in sync: they share samples and use the run's barriers.

    The order is reversed: the last rank owns the run's writers.
    """

    def __init__(self) -> None:
        size = torch.distributed.get_world_size()
        super().__init__(rank=size - 1 - torch.distributed.get_rank(), size=size)
        self.are_done = False

    def claims(self, count: int) -> Iterator[int]:
        return iter(range(self.rank, count, self.size))

    def reach(self, point: str) -> None:
        torch.distributed.barrier()

    def await_first(self, point: str) -> None:
        torch.distributed.barrier()

    def await_all(self, point: str, tell: Callable[[int], None] | None = None) -> None:
        """Return at once: `reach` is already a barrier."""
        self.are_done = True


def validation_samples(validation: Any, args: Namespace) -> list[Sample]:
    """Return the first samples of the validation set, with packed documents separated.

    Raises:
        UserError: the validation set is empty.
    """
    if validation is None or not len(validation):
        raise UserError("--analyze-interval: the validation set is empty (--split)")
    samples: list[Sample] = []
    replacement = replacement_of(args)
    for index in range(len(validation)):
        item = validation[index]
        tokens = [int(token) for token in item["tokens"]]
        bounds = [0, len(tokens)]
        if args.dataloader_inter_document_masking:
            real = int(item.get("real_tokens", len(tokens)))
            bounds = sorted({0, *(int(end) for end in item["cu_seqlens"] if 0 < end <= real)})
        places = [] if replacement is None else replaced_places(replacement, bounds)
        if args.sink_token:
            tokens = [args.sink_token_id, *tokens[:-1]]
            places = [place + 1 for place in places if place + 1 < len(tokens)]
        for start, stop in pairwise(bounds):
            if stop - start >= SHORTEST and len(samples) < args.analyze_samples:
                source = f"validation:{index}" + (f":{start}" if len(bounds) > 2 else "")
                replaced = tuple(stop - place for place in places if start <= place < stop)
                sample = Sample(tuple(tokens[start:stop]), "validation", source, replaced=replaced)
                samples.append(sample)
        if len(samples) == args.analyze_samples:
            break
    return samples


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    was = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was)
