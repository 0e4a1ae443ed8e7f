"""The ``megasink`` commands: one module per command, with its flags and its ``main``."""
