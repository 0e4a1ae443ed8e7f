"""Requirements on Megatron, torch and TransformerEngine: versions, patches, fixes.

``versions`` checks the installed versions; ``source`` finds a quoted line in an upstream file;
``register`` replaces upstream attributes; ``table`` lists every patch; and ``mends`` fixes upstream
defects that matter on every platform.
"""
