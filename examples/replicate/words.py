"""Results in words: numbers with their spread, verdicts as sentences."""

import statistics
from collections.abc import Sequence

from examples.replicate.claims import NOT_MEASURED, Verdict

DIGITS = 3


def number_text(number: float | None, digits: int = DIGITS) -> str:
    """Return a number with a few significant digits, and no exponent where that is readable."""
    if number is None:
        return "-"
    if number == 0 or 1e-3 <= abs(number) < 1e5:
        text = f"{number:.{digits}g}"
        return f"{number:,.0f}" if "e" in text or abs(number) >= 10**digits else text
    return f"{number:.1e}"


def spread_text(values: Sequence[float | None]) -> str:
    """Return mean ± standard deviation (n - 1), and how many have a number if not all do."""
    known = [value for value in values if value is not None]
    missing = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    if not known:
        return f"-{missing}"
    if len(known) == 1:
        return f"{number_text(known[0])}{missing}"
    mean, deviation = statistics.fmean(known), statistics.stdev(known)
    # The mean to the digit of the deviation's second.
    places = 6 if deviation == 0 else max(0, 1 - _exponent(deviation))
    if deviation == 0:
        return f"{number_text(mean)} ± 0{missing}"
    if places > 6 or abs(mean) >= 1e5:
        return f"{mean:.3g} ± {deviation:.2g}{missing}"
    return f"{mean:.{places}f} ± {deviation:.{places}f}{missing}"


def _exponent(number: float) -> int:
    return int(f"{abs(number):e}".partition("e")[2])


def p_text(p: float) -> str:
    """Return a probability; tiny ones as a bound."""
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"


def sentence(verdict: Verdict, count: int) -> str:
    """Return the verdict with its numbers, in one sentence.

    Args:
        count: of the claims that were corrected together.
    """
    sides = "; ".join(f"{name} {spread_text(v)}" for name, v in verdict.compared.items())
    if verdict.verdict == NOT_MEASURED:
        return f"{verdict.verdict}: fewer than 3 runs have the number ({sides})."
    assert verdict.p is not None
    assert verdict.corrected is not None
    found = f"{verdict.effect} {number_text(verdict.difference)}"
    if verdict.low is not None and verdict.low != verdict.high:
        found += f", 95% interval {number_text(verdict.low)} to {number_text(verdict.high)}"
    q = p_text(verdict.corrected).removeprefix("= ")
    corrected = f" ({q} corrected for {count} claims)" if count > 1 else ""
    return f"{verdict.verdict}: {sides}; {found}; {verdict.test}, p {p_text(verdict.p)}{corrected}."
