"""The case of test_context_parallel.py, for the tests and for the workers: torch alone."""

import torch

from tests.attention.attention_oracle import Case, make_case


def case_of(dtype: torch.dtype, sink: float, ranks: int = 2) -> Case:
    """Chunks of 7 tokens; sinks of that size whose signs change from head to head."""
    case = make_case(heads=8, groups=4, tokens=14 * ranks, dtype=dtype, sink=sink)
    return case.with_(grad_lse=None, sink=case.sink * torch.tensor([1.0, -1.0]).repeat(4))
