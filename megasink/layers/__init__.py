"""Megatron modules: parameters, tensor-parallel attributes, sharded state, the model builder."""
