"""Tasks for the workers: a tiny GPT-OSS as released, in MXFP4, and what transformers unpacks."""

import copy
import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

RELEASED = json.loads("""{
    "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
    "eos_token_id": 2, "experts_per_token": 2, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 64, "initial_context_length": 16, "initializer_range": 0.02,
    "intermediate_size": 96, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512, "model_type": "gpt_oss", "num_attention_heads": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "num_local_experts": 4, "output_router_logits": false, "pad_token_id": 1,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn",
    "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 16, "rope_type": "yarn", "truncate": false},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 8, "swiglu_limit": 7.0,
    "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true,
    "vocab_size": 101
}""")
"""Every key of openai/gpt-oss-20b; sizes, numbers of layers and experts, and lengths are ours."""


def save_released(folder: str) -> None:
    """Write a folder with the names and types of the released one, and large random weights."""
    import transformers

    torch.manual_seed(5)
    plain = {k: v for k, v in copy.deepcopy(RELEASED).items() if k != "quantization_config"}
    config = transformers.GptOssConfig.from_dict(plain)
    model = transformers.GptOssForCausalLM(config).bfloat16()
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith("_proj") and "experts" in name:
            experts, width, rows = weight.shape
            blocks = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(121, 125, blocks.shape[:3]).to(torch.uint8)
        else:
            tensors[name] = (weight + 0.2 * torch.randn(weight.shape)).bfloat16()
    Path(folder).mkdir()
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(RELEASED))


def differing(folder: str, exported: str) -> list[str]:
    """Return the weights in which a released folder, unpacked by transformers, differs."""
    import transformers

    unpacked = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours = load(exported, dtype=torch.bfloat16).state_dict()
    theirs = load(folder, dtype=torch.bfloat16, **unpacked).state_dict()
    assert ours.keys() == theirs.keys()
    return [name for name, weight in theirs.items() if not torch.equal(weight, ours[name])]


_PACKED = """
    --tokenizer-type NullTokenizer --vocab-size 101 --seq-length 64 --num-workers 0 --device cpu
    --micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0
    --log-interval 1 --split 1,0,0 --head-balance-coeff 0 --moe-router-load-balancing-type none
    --dataloader-inter-document-masking --finetune
""".split()


def packed_and_alone(folder: str) -> tuple[list[str], float, float]:
    """Import a random model; flags of a step on packed documents, and its loss and gradient norm.

    Both are of stock transformers with eager attention, each document alone.
    """
    import transformers

    from megasink.convert.hf_config import config_of
    from megasink.convert.targets import TARGETS
    from tests.convert.accuracy_tasks import import_released
    from tests.convert.models import MODELS
    from tests.distributed.data_tasks import samples, write_numbered

    target, architecture = MODELS["gpt_oss-yarn"]
    import_released(folder, config_of(architecture, TARGETS[target], {}))
    root = Path(folder)
    write_numbered(str(root / "text"), (9, 3, 20, 1, 31, 14, 7, 15), 1)
    flags = [*(root / "run/flags.txt").read_text().split(), *_PACKED]
    flags += ["--data-path", str(root / "text"), "--load", str(root / "run/checkpoints")]
    (found,) = samples(flags, [2])
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(root / "hf", dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    losses = []
    for sample in range(2):  # the first ones, of more
        tokens, labels, ends = (found[n][sample] for n in ("tokens", "labels", "cu_seqlens"))
        bounds = sorted({*ends.tolist()})
        assert len(bounds) > 3
        for start, end in pairwise(bounds):
            logits = model(tokens[None, start:end]).logits[0]
            losses.append(cross_entropy(logits, labels[start:end], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    return flags, loss.item(), norms.norm().item()
