"""`megasink finetune`: a Hugging Face model adapted on conversations, and exported again."""
