"""A tiny model, and conversations to adapt it on."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import train_tokenizer
from tests.chats import MARKED, chat_tokenizer, conversations, write_chats


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """model: a Qwen3 whose heads differ, stored in bfloat16; chats.jsonl."""
    root = tmp_path_factory.mktemp("finetune")
    text = [Document(f"{chat}", "chats") for chat in conversations(60, seed=1)]
    train_tokenizer(text, 320, root / "tokenizer")
    chat_tokenizer(root / "tokenizer", root / "model", MARKED)
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=322,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(root / "model")
    (root / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    write_chats(root / "chats.jsonl", conversations(80, exchanges=1, words=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        yield root
