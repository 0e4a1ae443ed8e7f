"""Token generation from a trained model."""
