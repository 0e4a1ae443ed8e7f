"""What megasink asks of Megatron, torch and TransformerEngine: versions, patches, mends.

``versions`` what is installed, and whether it was tested; ``source`` finds a quoted line in an
upstream file; ``register`` replaces upstream attributes; ``table`` declares every such patch; and
``mends`` repairs the defects that stand in the way on every platform.
"""
