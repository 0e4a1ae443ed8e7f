"""Requirements on Megatron, torch and TransformerEngine: versions, patches, fixes.

``versions`` checks the installed versions; ``register`` replaces upstream attributes, and finds the
quoted lines that a patch depends on; ``fixes`` has the fixes that every platform needs, which
``apply`` applies.
"""
