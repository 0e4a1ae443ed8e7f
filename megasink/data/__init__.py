"""From text to what Megatron trains on: corpus -> tokenizer -> .bin/.idx."""
