"""The trainer: arguments, Megatron's training loop, the loss hook, logging."""
