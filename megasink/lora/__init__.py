"""LoRA (https://arxiv.org/abs/2106.09685) in Megatron runs: a weight W becomes W + alpha/r B A."""
