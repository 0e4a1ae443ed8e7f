"""The names of `import megasink`: analyses, models and results for programs and notebooks."""
