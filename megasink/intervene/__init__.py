"""Change what a model's heads write, or which tokens it reads, and see what that costs."""
