"""The terminal: text that is safe to print, progress, signals, JSON on stdout."""
