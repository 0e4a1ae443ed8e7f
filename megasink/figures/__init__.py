"""Pictures of runs: their style, heatmaps, curves, and the spikes of a loss."""
