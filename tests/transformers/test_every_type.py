"""Every causal model type of the installed transformers gets right numbers, or one sentence.

The types are those of transformers' own mapping, so that a new version brings its new ones. What
`SIZES` does not make small is skipped; what eager attention reports is compared with.

Shapes: B rows, T tokens.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

import megasink
import megasink.transformers
from megasink.analysis.capture.probe import Listener
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.interventions import DynamicZeroing
from megasink.errors import UserError
from megasink.transformers.balance_loss import HeadBalanceLoss
from megasink.transformers.decoder_blocks import find_blocks, output_weight
from tests.analysis.capture.kept import Kept
from tests.analysis.capture.tiny_models import tiny_model

VOCABULARY, TOKENS, MOST_PARAMETERS = 64, 11, 3_000_000
SIZES = {
    0: "pad_token_id",
    1: "bos_token_id encoder_attention_heads n_groups mamba_n_groups n_group topk_group "
    "index_topk_blocks index_local_blocks indexer_compress_ratio",
    2: "eos_token_id encoder_layers num_experts_per_tok num_key_value_heads num_kv_shared_layers "
    "index_block_size max_window_layers sliding_window_pattern no_rope_layer_interval "
    "global_attn_every_n_layers indexer_kv_heads",
    4: "num_hidden_layers n_layer n_layers decoder_layers num_attention_heads n_head n_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts mamba_dt_rank "
    "qk_nope_head_dim qk_rope_head_dim rotary_dim index_n_heads index_head_dim index_topk "
    "indexer_budget indexer_head_dim indexer_n_heads",
    5: "sliding_window attention_window_size attention_chunk_size sliding_window_size "
    "local_attention keep_window_size",
    8: "head_dim v_head_dim kv_lora_rank linear_num_value_heads linear_num_key_heads mamba_n_heads "
    "linear_key_head_dim linear_value_head_dim mamba_d_head",
    16: "moe_intermediate_size hidden_size_per_layer_input laurel_rank",
    32: "hidden_size d_model n_embd embedding_size lru_width",
    48: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim",
    VOCABULARY: "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions",
}
NEEDS = {"first_weight_HT", "slot_weight_HT", "output_weight_HDE", "state_TE"}


def small(name: str, **own: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of a type in evaluation mode with skewed attention, and a copy with eager's.

    What a configuration can switch on is on and smaller than the texts: windows, chunks, chosen
    keys, layers of both kinds, a part of a head that rotates.
    """
    kind = getattr(transformers, TYPES[name])
    config_class = kind.config_class or CONFIG_MAPPING[name]
    known = set(config_class.attribute_map)
    for part in config_class.__mro__:
        known |= getattr(part, "__annotations__", {}).keys()
    sizes = {field: size for size, fields in SIZES.items() for field in fields.split()}
    sizes |= {"is_decoder": True, "use_sliding_window": True, "partial_rotary_factor": 0.5}
    if "qk_rope_head_dim" in known:  # where it is what rotates, and every head has its own keys
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "partial_rotary_factor": 1.0}
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= own
    try:
        config = config_class(**{field: sizes[field] for field in known & sizes.keys()})
        with torch.device("meta"):
            count = kind._from_config(copy.deepcopy(config)).num_parameters()
        if count > MOST_PARAMETERS:
            pytest.skip(f"{count:,} parameters are left")
        torch.manual_seed(0)
        model = kind._from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, 0.0, 0.15)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            logits(eager)
    except Exception as error:  # of transformers, of any kind
        pytest.skip(f"cannot be made small: {str(error)[:100]}")
    return model, eager


def tokens() -> Tensor:
    """[B, T]."""
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def logits(model: PreTrainedModel) -> Tensor:
    return model(tokens(), use_cache=False).logits


def close(actual: Tensor, expected: Tensor) -> None:
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=1e-4 * largest, rtol=1e-4)


def check_weights(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """The weight of the first token is what eager attention reports."""
    kept = Kept(NEEDS)
    with TransformersProbe(model, kept) as probe:
        probe.forward(tokens())
    with torch.no_grad():
        weights = eager(tokens(), use_cache=False, output_attentions=True).attentions
    if len(weights) != len(probe.heads):  # else some are of linear attention
        layers = sorted({layer for _, layer in kept.layers})
        weights = dict(zip(layers, weights, strict=True))
    for (sample, layer), found in kept.layers.items():
        if not found["slot_weight_HT"].any():  # some report what the softmax was without a sink
            close(found["first_weight_HT"], weights[layer][sample, ..., 0])


def check_zeroing(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """A head that is zeroed is one whose columns of the output projection are 0."""
    layer = next(i for i, block in enumerate(find_blocks(model)) if block.heads)
    with torch.no_grad():
        before = logits(model)
        with megasink.zero_heads(model, [(layer, 1)]):
            found = logits(model)
        assert torch.equal(logits(model), before)
        block = find_blocks(without := copy.deepcopy(model))[layer]
        output_weight(block.output, block.heads)[1] = 0  # a view
        close(found, logits(without))


def check_attention(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """Logits and a gradient of the attention "megasink" are eager's."""
    results = []
    model.set_attn_implementation("megasink")
    for one in (model, eager):
        found = logits(one)
        weight = one.get_input_embeddings().weight
        results.append((found.detach(), *torch.autograd.grad(found.square().mean(), weight)))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)


def check_balance(model: PreTrainedModel, eager: PreTrainedModel) -> None:
    """The head-balance loss reads a gate of every head in a step of training."""
    model.set_attn_implementation("megasink")
    balance = HeadBalanceLoss(model)
    try:
        model.train()(tokens(), labels=tokens(), use_cache=False).loss.backward()
        importance = balance.finish_step().importance_LH
    finally:
        balance.remove()
        model.eval()
    read = importance[list(balance.layers)]
    assert ((read > 0) & (read < 1)).all()


# Why one instrument refuses a model that another accepts.
UNFOUND = "megasink cannot find|no output projection"
REASONS = (
    f"{UNFOUND}|without a matrix of weights|does not fit"  # modules of other names
    "|bypasses transformers' attention interface"
    "|uses attention dropout"  # in training alone
    "|may gate the heads|gates its heads by|changes the outputs of its heads"
    "|attends to 4 of|does not support the mask|several residual streams"
    "|reads its attention mask|caps its attention|adds a position bias|is chunked|attends from"
)
# Types whose attention the implementation "megasink" runs, or that have none at this size, and in
# which the other instruments find no layers of attention: encoders, recurrent models, other names.
NOT_FOUND = set(
    """
    bailing_hybrid bamba bert bert-generation big_bird camembert ctrl data2vec-text electra ernie
    falcon_mamba granitemoehybrid hrm_text jamba jetmoe mamba megatron-bert modernbert-decoder
    rembert roberta roberta-prelayernorm roformer rwkv xlm xlm-roberta xlm-roberta-xl xlnet xlstm
    """.split()
)
CHECKS = (check_weights, check_zeroing, check_attention, check_balance)


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_right_or_refused(name):
    model, eager = small(name)
    refused = {}
    for check in CHECKS:
        if text := refusal(check, model, eager):
            assert len(text.splitlines()) == 1
            refused[check] = text
    if len(refused) < len(CHECKS):
        assert all(re.search(REASONS, text) for text in refused.values()), refused
    if check_attention not in refused:
        unfound = any(re.search(UNFOUND, text) for text in refused.values())
        assert unfound == (name in NOT_FOUND), refused


def refusal(check: Callable[..., None], *models: PreTrainedModel) -> str | None:
    """The sentence by which a check is refused."""
    try:
        check(*models)
    except UserError as error:
        return str(error)
    return None


def test_the_decoder_is_what_is_read():
    """Not an encoder that it was cut from, with another number of heads, nor a vision tower."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=28)
    config = transformers.LlavaConfig(text_config=tiny_model("llama").config, vision_config=vision)
    model = transformers.LlavaForConditionalGeneration._from_config(config).eval()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    for models in ((model, eager), small("bart")):
        check_weights(*models)
        check_zeroing(*models)
    check_attention(*small("bart"))


@pytest.mark.parametrize(
    ("name", "check", "sentence"),
    [
        ("deepseek_v32", check_weights, "attends to 4 of 11 keys .* texts of at most 4 tokens"),
        ("glm_moe_dsa", check_weights, "attends to 4 of 11 keys .* texts of at most 4 tokens"),
        ("deepseek_v32", check_attention, "chooses keys|reads its attention mask"),
        ("doge", check_attention, "reads its attention mask"),
        ("doge", check_weights, "mask of DogeAttention: it adds numbers other than 0"),
        ("gemma3n_text", check_weights, "has several residual streams"),
        ("mamba", check_zeroing, "cannot find attention in the 4 layers"),
        # transformers 5.6 has its attention outside of the interface.
        ("moshi", check_weights, "without a matrix of weights|bypasses transformers' attention"),
        ("prophetnet", check_zeroing, "does not fit 11 tokens and 4 heads"),
    ],
)
def test_what_is_out_of_reach_is_refused(name, check, sentence):
    assert re.search(sentence, str(refusal(check, *small(name))))


@pytest.mark.parametrize("name", ["nemotron_h", "recurrent_gemma"])
def test_attention_under_the_name_of_a_mixer_is_found(name):
    models = small(name)
    assert 0 < sum(block.heads > 0 for block in find_blocks(models[0])) < 4
    assert [refusal(check, *models) for check in CHECKS] == [None] * len(CHECKS)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_that_chooses_every_key_is_read(name):
    check_weights(*small(name, index_topk=TOKENS))


def test_blocks_of_keys_that_are_chosen_are_refused():
    kinds = ["full_attention", *["minimax_m3_sparse"] * 3]
    model, eager = small("minimax_m3_vl_text", layer_types=kinds)
    with pytest.raises(UserError, match="attends to 2 of 11 keys"):
        check_weights(model, eager)


def test_a_zeroing_that_reads_attention_is_refused_too():
    """Not one of given heads: it leaves the model's attention alone."""
    model, _ = small("deepseek_v32")
    change = DynamicZeroing("awft", 0.3).running()
    with (
        pytest.raises(UserError, match="attends to 4 of 11 keys"),
        TransformersProbe(model, Listener(), [change]) as probe,
    ):
        probe.forward(tokens())


def test_layers_have_their_own_numbers_of_heads():
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.num_heads = 3
    assert [block.heads for block in find_blocks(model)] == [4, 3]
    with pytest.raises(UserError, match="attends with 4 heads, but its configuration says 3"):
        check_weights(model, model)
    model.set_attn_implementation("megasink")
    with pytest.raises(UserError, match="layers of 3 and of 4 heads"):
        HeadBalanceLoss(model)
