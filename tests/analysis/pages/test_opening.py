"""The first sentences of a report."""

from megasink.analysis.pages.opening import _paragraphs
from megasink.analysis.results import MetricResult, SampleResults


def test_a_sentence_of_enough_data_has_no_reserve():
    of = {"sink_rate": 0.5, "first_token_attention": 0.4, "circuit_stage": "none"}
    of |= {"sink_centre": 0.0, "imbalance": 0.1}
    metrics = {name: MetricResult(None, number) for name, number in of.items()}
    metrics["importance"] = MetricResult([[0.2, 0.8]], 0.5)
    spread = {"sink_rate": 0.125}
    for samples, tokens, little in ((16, 64, False), (15, 64, True), (16, 63, True)):
        results = SampleResults(
            samples=samples,
            tokens=samples * tokens,
            metrics=metrics,
            sink_positions={},
            spread=spread,
        )
        text = " ".join(_paragraphs("model", results))
        assert "50.0% of the heads (± 12.5 over samples) have" in text
        assert "0.200 (layer 0, head 0) to 0.800 (layer 0, head 1)" in text
        assert ("say little about the model" in text) == little
    metrics["importance"] = MetricResult([[0.2001, 0.2]], 0.5)
    assert "It is 0.200 in every head, and" in " ".join(_paragraphs("model", results))
