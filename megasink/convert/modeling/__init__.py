"""The modelling files for transformers that are copied beside the weights."""
