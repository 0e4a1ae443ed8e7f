"""Cost of observing: the CPU time of a training step with everything written over one without.

One process, the model of benchmarks/step_time.py with sinks and the head-balance loss. Kinds of
steps take turns: without the writer; with it, between two log lines; on a log line (details,
TensorBoard scalars); on a log line with the picture of head importance. A step's CPU time, of all
threads, is compared with that of the step without the writer in the same turn, so that other
work on the machine matters little; what comes after the optimizer's step, the writer itself, is
in a column of its own. One thread by default: threads that wait for others count as busy.

    python benchmarks/observe.py --turns 40
"""

import argparse
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import step_time
import torch
from bench_model import SHAPE, VOCABULARY, one_process

OFF, BETWEEN, LOGGED, PICTURE = "without", "between log lines", "log line", "log line + picture"


class Trainer:
    """A model, its optimizer and a writer of metrics into a folder."""

    def __init__(self, folder: Path, sequence: int):
        from megasink.training import metrics_writer

        self.options = {"attention_variant": "sink", "head_balance_coeff": 1e-4}
        self.model = step_time.build(self.options, sequence, "cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(
            VOCABULARY, (step_time.BATCH, sequence + 1), generator=generator
        )
        self.positions = torch.arange(sequence)[None]
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))
        self.args = Namespace(
            rank=0,
            world_size=1,
            iteration=0,
            head_balance_coeff=1e-4,
            head_balance_scope="global",
            global_batch_size=step_time.BATCH,
            seq_length=sequence,
            consumed_train_samples=0,
            train_iters=10**9,
            log_interval=1,
            head_heatmap_interval=0,
            stop_on_divergence=None,
            save=None,
        )
        mock.patch.object(metrics_writer, "get_args", return_value=self.args).start()
        mock.patch.object(
            metrics_writer, "get_tensorboard_writer", return_value=self.writer
        ).start()
        mock.patch.object(metrics_writer, "get_wandb_writer", return_value=None).start()
        mock.patch.object(metrics_writer.MetricsWriter, "_print").start()
        statistics, path = self.model.config.statistics, folder / "metrics.jsonl"
        self.metrics = metrics_writer.MetricsWriter(statistics, path)
        self.iteration = 0

    def step(self, kind: str) -> tuple[float, float]:
        """Train one step: its CPU seconds, and those of them that the writer took."""
        self.iteration += 1
        self.args.log_interval = 1 if kind in (LOGGED, PICTURE) else 10**9
        self.args.head_heatmap_interval = int(kind == PICTURE)
        start = time.process_time()
        balance = self.model.config.statistics
        balance.begin(self.iteration - 1, observe=kind in (LOGGED, PICTURE))
        self.optimizer.zero_grad()
        inputs, labels = self.tokens[:, :-1], self.tokens[:, 1:]
        loss = self.model(inputs, self.positions, None, labels=labels).mean()
        loss.backward()
        balance.reduce()
        self.optimizer.step()
        middle = time.process_time()
        if kind != OFF:
            call = {
                "iteration": self.iteration,
                "loss_dict": {"lm loss": loss.detach()},
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "skipped_iter": 0,
            }
            self.metrics.step(call)
        end = time.process_time()
        return end - start, end - middle


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    one_process(args.threads)
    kinds = [OFF, BETWEEN, LOGGED, PICTURE]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    writer: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), args.sequence)
        for turn in range(args.turns + 2):
            # Each kind comes at each place of a turn.
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                seconds, of_writer = trainer.step(kind)
                if turn >= 2:  # the first turns warm up
                    times[kind].append(seconds)
                    writer[kind].append(of_writer)
        trainer.metrics.close()
        trainer.writer.close()
    print(f"S {args.sequence}, B {step_time.BATCH}, {SHAPE}, fp32, ", end="")
    print(f"{args.threads} threads, torch {torch.__version__}, {args.turns} turns, CPU time\n")
    print("| step | CPU ms | more than without (median, quartiles) | ratio | writer alone |")
    print("|---|---|---|---|---|")
    alone = {}
    for kind, values in times.items():
        more = [1e3 * (v - o) for v, o in zip(values, times[OFF], strict=True)]
        ratio = statistics.median(v / o for v, o in zip(values, times[OFF], strict=True))
        low, middle, high = statistics.quantiles(more, n=4)
        milliseconds = 1e3 * statistics.median(values)
        text = f"{middle:.1f} ms ({low:.1f} to {high:.1f})"
        alone[kind] = 1e3 * statistics.median(writer[kind])
        print(f"| {kind} | {milliseconds:.0f} | {text} | {ratio:.4f} | {alone[kind]:.1f} ms |")
    between, logged = alone[BETWEEN] - alone[OFF], alone[LOGGED] - alone[OFF]
    mean = 0.9 * between + 0.1 * logged + (alone[PICTURE] - alone[LOGGED]) / 1000
    base = 1e3 * statistics.median(times[OFF])
    print(f"\nthe writer alone, --log-interval 10, --head-heatmap-interval 1000: {mean:.2f} ms")
    print(f"per step on average, ratio {1 + mean / base:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
