"""Megatron modules: attention layers, parameters, sharded state and the model builder."""
