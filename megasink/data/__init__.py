"""Convert text to Megatron's training data: corpus -> tokenizer -> .bin/.idx."""
