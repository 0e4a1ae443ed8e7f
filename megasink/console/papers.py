"""The papers whose methods megasink implements; P0.7 is row 7 of P0 in docs/papers.md."""

PAPERS = {
    "P0": (
        "Attention Sink Forges Native MoE in Attention Layers: Sink-Aware Training to Address Head "
        "Collapse",
        "2602.01203",
    ),
    "P1": (
        "Gated Attention for Large Language Models: Non-linearity, Sparsity, and "
        "Attention-Sink-Free",
        "2505.06708",
    ),
    "P2": ("When Attention Sink Emerges in Language Models: An Empirical View", "2410.10781"),
    "P3": ("Identifying and Evaluating Inactive Heads in Pretrained LLMs", "2504.03889"),
    "P4": (
        "How Attention Sinks Emerge in Large Language Models: An Interpretability Perspective",
        "2603.06591",
    ),
}
"""Short name -> title, arXiv number."""


def cited(name: str) -> str:
    """Return the title and address of a paper."""
    title, number = PAPERS[name]
    return f"{title}, https://arxiv.org/abs/{number}"
