"""What ``megasink COMMAND`` does: one module a command, with its flags and its ``main``."""
