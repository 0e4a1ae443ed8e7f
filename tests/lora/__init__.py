"""LoRA in Megatron runs, and adapters to and from peft."""
