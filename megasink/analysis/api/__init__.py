"""What `import megasink` gives: analyses, models and results for programs and notebooks."""
