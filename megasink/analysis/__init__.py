"""Look inside a model, change its heads, score it, draw it."""
