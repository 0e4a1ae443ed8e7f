"""Fine-tuning of models of transformers on conversations."""
