"""LoRA (https://arxiv.org/abs/2106.09685) in Megatron runs: the weights W become W + alpha/r B A."""
