"""Refuse entries of a config.json that an import does not read and that could change its model."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

# Entries about the file, old spellings, and entries by which transformers runs foreign code: an
# import does not keep them, and an export does not write them from a stranger's run.
OF_THE_FILE = frozenset(
    """
    architectures model_type transformers_version _name_or_path _commit_hash torch_dtype
    rope_scaling rope_theta auto_map custom_pipelines attn_implementation _attn_implementation
    _attn_implementation_internal _attn_implementation_autoset experts_implementation
    _experts_implementation _experts_implementation_internal quantization_config
    """.split()
)
# Entries that do not change the logits of the next token: of training, of sampling, of labels, of
# layouts, and of layers of multi-token prediction, which transformers does not load.
_HARMLESS = OF_THE_FILE | frozenset(
    """
    initializer_range use_cache router_jitter_noise aux_loss_alpha seq_aux gradient_checkpointing
    pretraining_tp ep_size mamba_ssm_dtype initial_context_length experts_per_token
    num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers
    return_dict output_attentions output_hidden_states output_router_logits torchscript
    use_bfloat16 is_decoder chunk_size_feed_forward keys_to_ignore_at_inference
    finetuning_task id2label label2id num_labels problem_type task_specific_params tokenizer_class
    prefix is_llama_config use_flash_attn use_flash_attention unsloth_fixed
    model_max_length max_seq_len max_seq_length max_sequence_length seq_length seq_len
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate
    remove_invalid_values begin_suppress_tokens suppress_tokens bad_words_ids
    """.split()
)
_ENDINGS = ("dropout", "dropout_prob", "pdrop", "token_id", "token_ids", "loss_coef", "_version")
# An unknown factor of one changes nothing.
_FACTORS = ("multiplier", "scale", "scaling", "factor", "ratio", "mult", "alpha")


class Recorded(dict[str, Any]):
    """A config.json that records which of its entries are read."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def unread(config: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Return the entries not in `read` that may change the model: not harmless, not a default."""
    left = {key: v for key, v in config.items() if key not in read and not _is_harmless(key, v)}
    defaults = _defaults(config["model_type"]) if left else {}
    return [
        f"{key} {str(value)[:80]}"
        for key, value in left.items()
        if (value != defaults[key] if key in defaults else not _is_neutral(key, value))
    ]


def _is_harmless(key: str, value: Any) -> bool:
    named = key in _HARMLESS or key.endswith(_ENDINGS) or key[:1] == "_" or "." in key
    return named or value is None


def _is_neutral(key: str, value: Any) -> bool:
    return not value or (value == 1 and key.endswith(_FACTORS))


@functools.cache
def _defaults(model_type: str) -> dict[str, Any]:
    """Return the entries of the class of a config.json; {} without it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    found: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    return found
