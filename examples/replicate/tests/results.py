"""A result with invented numbers, of every part that a page shows."""

from examples.replicate import claims
from examples.replicate.cone import Check
from examples.replicate.record import Large, Result, Run, by_cell, curve_of

CLAIMS = [
    {
        "says": "The loss lowers the imbalance | of sinks",
        "paper": "P0 Fig. 5: 0.9 -> 0.3",
        "metric": "imbalance",
        "lower": "sink, loss",
        "higher": "sink, no loss",
    },
    {"says": "A sink forms", "metric": "heads/sink_rate", "cell": "sink, no loss", "above": 0.5},
]


def runs() -> list[Run]:
    """Two cells of three seeds; one run diverged."""
    made = []
    for cell, imbalance in (("sink, loss", 0.1), ("sink, no loss", 0.8)):
        for seed in (1, 2, 3):
            steps, scale = [0.0, 50.0, 100.0], imbalance + 0.01 * seed
            values = [scale * step / 100 for step in steps]
            metrics = {
                "imbalance": values[-1],
                "heads/sink_rate": 0.2 + 0.1 * seed,
                "stage": "none",
            }
            if cell == "sink, no loss" and seed == 3:
                metrics["heads/sink_rate"] = None
            made.append(
                Run(
                    cell=cell,
                    seed=seed,
                    metrics=metrics,
                    curves={"imbalance": (steps, values)},
                    seconds=20.0,
                    cpu_seconds=30.0,
                )
            )
    return made


def result(name: str = "z", form: str = "fast") -> Result:
    """The result of these runs."""
    made = runs()
    cells = by_cell(made, ["imbalance", "heads/sink_rate"])
    curves = {
        cell: curve_of([run for run in made if run.cell == cell], "imbalance") for cell in cells
    }
    return Result(
        experiment=name,
        form=form,
        title="Head balance",
        rows=["P0.21"],
        setting="A small model.",
        prediction="The loss evens the heads out.",
        predicted="2026-11-22",
        date="2026-11-23",
        versions={"megasink": "1"},
        hardware="2 cores",
        seconds=120,
        cpu_seconds=180,
        runs=6,
        seeds=[1, 2, 3],
        metrics=["imbalance", "heads/sink_rate"],
        cells=cells,
        curves={"imbalance": {cell: curve for cell, curve in curves.items() if curve}},
        maps={"sink, loss": [[0.5, 0.9], [0.8, None]]},
        checks=[
            Check(
                what="E norm(c)²",
                source="P4 Eq. 11",
                expected=0.5,
                measured=0.51,
                low=0.49,
                high=0.53,
                draws=10,
                seed=1,
            )
        ],
        verdicts=claims.verdicts(CLAIMS, cells),
        large=[Large(says="Table 1", command="megasink train --tiny")],
    )
