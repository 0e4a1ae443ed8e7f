"""Measure the loss of a model without some of its heads."""
