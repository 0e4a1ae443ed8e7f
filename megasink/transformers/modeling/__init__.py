"""The modeling files for transformers, which are copied into exported folders."""
