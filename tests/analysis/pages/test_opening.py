"""The first sentences of a report."""

from megasink.analysis.pages.summary_in_words import _paragraphs
from megasink.analysis.result_schemas import MetricResult, SampleResults


def opening(samples=16, tokens=64, **metrics):
    of = {"sink_rate": 0.5, "first_token_attention": 0.4, "circuit_stage": "none"}
    of |= {"sink_centre": 0.0, "imbalance": 0.1}
    found = {name: MetricResult(None, number) for name, number in of.items()}
    found["importance"] = MetricResult([[0.2, 0.8]], 0.5)
    results = SampleResults(
        samples=samples,
        tokens=samples * tokens,
        metrics=found | metrics,
        sink_positions={},
        spread={"sink_rate": 0.125},
    )
    return " ".join(_paragraphs("model", results))


def test_a_sentence_of_enough_data_has_no_reserve():
    for samples, tokens, little in ((16, 64, False), (15, 64, True), (16, 63, True)):
        text = opening(samples, tokens)
        assert "50.0% of the heads (± 12.5 over samples) have" in text
        assert "0.200 (layer 0, head 0) to 0.800 (layer 0, head 1)" in text
        assert ("say little about the model" in text) == little
    text = opening(importance=MetricResult([[0.2001, 0.2]], 0.5))
    assert "Importance is 0.200 in every head. The head imbalance" in text


def test_the_layer_of_the_longest_first_token_counts_outputs_of_blocks():
    """States: the embedding, then the state after attention and the output of each block."""
    ratios = [9.0, 8.0, 1.0, 7.0, 3.0, 6.0, 2.0]
    text = opening(massive_ratio=MetricResult(ratios, 3.0))
    assert "After layer 1 the first token's hidden state is 3.0 times as long" in text


def test_layers_with_sinks_are_counted_from_0():
    text = opening(sink_rate_by_layer=MetricResult([0.1, 0.49, 0.5, 0.2], 0.3))
    assert "Layer 2 is the first in which half of the heads have a sink." in text
