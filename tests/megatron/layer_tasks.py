"""Tasks for the workers: facts about the parameters that megasink adds to Megatron's model."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model
from torch.multiprocessing.reductions import StorageWeakRef

from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.initial_weights import global_names, initialize_weights
from megasink.megatron.model import MegasinkModelBuilder
from megasink.megatron.torch_norm import TorchNorm
from tests.distributed import tiny_gpt
from tests.said import said


def softmax_offset_facts(distributed_optimizer: bool, **options: Any) -> dict[str, Any]:
    """Dtype, attributes, optimizer group and checkpoint key of the sinks of this rank."""
    config = tiny_gpt.model_config(**options)
    models = tiny_gpt.build(config, use_distributed_optimizer=distributed_optimizer)
    optimizer, scheduler = tiny_gpt.optimizer_of(config, models, distributed_optimizer)
    transformer = config.transformer
    transformer.grad_scale_func = optimizer.scale_loss
    (model,) = unwrap_model(models)
    layers = [m for m in model.modules() if isinstance(m, CoreAttention)]
    offset = layers[0].softmax_offset
    main = getattr(offset, "main_param", offset)
    before = main.detach().clone()
    tiny_gpt.run_step(models, optimizer, 0)
    grad_dtype = str(offset.main_grad.dtype)
    optimizer.step()
    scheduler.step(1)
    sharded = [
        value
        for key, value in model.sharded_state_dict().items()
        if key.endswith("core_attention.softmax_offset") and isinstance(value, ShardedTensor)
    ]
    return {
        "dtype": str(offset.dtype),
        "other_dtypes": sorted({str(p.dtype) for p in model.parameters() if p.dim() > 1}),
        "grad_dtype": grad_dtype,
        "moved": float((main - before).abs().min()),
        "finer_than_bf16": bool((main != main.bfloat16().float()).any()),
        "is_the_main_weight": bool(torch.equal(offset.flatten(), main.flatten().to(offset.dtype))),
        "tensor_model_parallel": offset.tensor_model_parallel,
        "partition_dim": offset.partition_dim,
        "partition_stride": offset.partition_stride,
        "weight_decays": weight_decays(optimizer, model),
        "keys": sorted(shard.key for shard in sharded),
        "global_shapes": [tuple(shard.global_shape) for shard in sharded],
        "global_offsets": sorted(tuple(shard.global_offset) for shard in sharded),
        "local_shapes": [tuple(shard.local_shape) for shard in sharded],
    }


def bias_facts(**options: Any) -> dict[str, Any]:
    """Dtypes, attributes and checkpoint entries of the parameters of core attention."""
    config = tiny_gpt.model_config(**options)
    (model,) = unwrap_model(tiny_gpt.build(config))
    layer = next(m for m in model.modules() if isinstance(m, CoreAttention))
    found: dict[str, Any] = {"softmax_type": config.transformer.softmax_type}
    for name, parameter in layer.named_parameters():
        found[name] = {
            "dtype": str(parameter.dtype),
            "shape": tuple(parameter.shape),
            "by heads": bool(getattr(parameter, "tensor_model_parallel", False)),
        }
        shards = [
            value
            for key, value in model.sharded_state_dict().items()
            if key.endswith(f"core_attention.{name}") and isinstance(value, ShardedTensor)
        ]
        found[name]["offsets"] = [shard.global_offset[0] for shard in shards]
        found[name]["whole"] = {tuple(shard.global_shape) for shard in shards}
    return found


def weight_decays(optimizer: Any, model: torch.nn.Module) -> dict[str, list[float]]:
    """Number of elements the optimizer updates, by weight decay, of vectors and of matrices."""
    sizes: dict[str, list[float]] = {}
    for group in optimizer.param_groups:
        count = sum(p.numel() for p in group["params"])
        sizes.setdefault(str(group["weight_decay"]), []).append(count)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    return {**sizes, "elements of vectors": [vectors]}


def vocabulary_rows(vocabulary: int) -> tuple[int, int]:
    """Rows of the embedding and of the output layer on this rank."""
    config = tiny_gpt.model_config()
    config.vocab_size = vocabulary
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups)
    return len(model.embedding.word_embeddings.weight), len(model.output_layer.weight)


def refusals() -> dict[str, str]:
    """{what is asked for: the message of the refusal, or "" where there is none}."""
    from megatron.core.transformer.enums import AttnMaskType

    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = tiny_gpt.model_config()
    good = {
        "config": config.transformer,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": groups,
    }
    packed = PackedSeqParams(qkv_format="sbhd")
    query = torch.zeros(4, 1, tiny_gpt.HEADS, 16)
    key = torch.zeros(4, 1, 2, 16)
    layer = CoreAttention(**good)

    return {
        "good": said(lambda: layer(query, key, key, None)),
        "cross": said(lambda: CoreAttention(**good | {"attention_type": "cross"})),
        "mask": said(lambda: CoreAttention(**good | {"attn_mask_type": AttnMaskType.padding})),
        "packed": said(lambda: layer(query, key, key, None, packed_seq_params=packed)),
        "bias": said(lambda: layer(query, key, key, None, attention_bias=query)),
    }


def initial_weights(init_seed: int, **options: Any) -> dict[str, Any]:
    """The weights of a fresh model."""
    config = tiny_gpt.model_config(**options)
    config.init_seed = init_seed
    torch.manual_seed(5)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups)
    names = global_names(model)
    return {names[name]: p.detach() for name, p in model.named_parameters()}


def checkpoint_keys(**options: Any) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of a fresh model and their whole shapes."""
    config = tiny_gpt.model_config(**options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    state = MegasinkModelBuilder(config).build_model(groups).sharded_state_dict()
    return {
        shard.key: tuple(shard.global_shape)
        for shard in state.values()
        if isinstance(shard, ShardedTensor)
    }


def transformer_engine_spec(**options: Any) -> dict[str, list[str]]:
    """Names of the modules of TransformerEngine's layers with options of the block.

    The spec can be made where TransformerEngine is not installed; the modules cannot.
    """
    from unittest import mock

    from megatron.core.extensions import transformer_engine
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megasink.megatron.block_options import with_block_options

    with mock.patch.object(specs, "TESpecProvider", TESpecProvider):
        make = specs.get_gpt_layer_with_transformer_engine_spec
        layers = [make(num_experts=count) for count in (None, 4)]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)
    config = tiny_gpt.model_config(**options).transformer
    changed = with_block_options(block, config)
    found = {"final": [changed.layer_norm.__name__] if changed.layer_norm else []}

    def name(module: Any) -> str:
        # Without TransformerEngine its classes are mocks: known by what they are called there.
        for known, value in vars(transformer_engine).items():
            if value is module and known.startswith("TE"):
                return known
        return str(getattr(module, "module", module).__name__)

    for kind, layer in zip(("dense", "moe"), changed.layer_specs, strict=True):
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        mlp = parts.mlp.keywords["submodules"]
        found[kind] = [
            *map(name, (parts.input_layernorm, attention.linear_qkv, attention.linear_proj)),
            name(parts.self_attn_bda),
            name(parts.pre_mlp_layernorm),
            *([name(mlp.linear_fc1)] if kind == "dense" else []),
            name(parts.mlp_bda),
        ]
    return found


def unknown_weight() -> str:
    """The refusal of a weight whose initialisation is not known; "" if there is none."""
    config = tiny_gpt.model_config()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups)
    model.decoder.layers[0].extra = torch.nn.Linear(4, 4, bias=False)
    return said(initialize_weights, model, 1)


def norm_facts() -> dict[str, Any]:
    """Norms as the spec builds them: kinds, epsilon, marks for sequence parallelism, refusals."""
    found: dict[str, Any] = {}
    for name, kind in (("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)):
        config = tiny_gpt.model_config(normalization=name).transformer
        norm = TorchNorm(config, 8, eps=1e-3)
        found[name] = (type(norm) is kind, norm.eps, norm.weight.sequence_parallel)
        config.sequence_parallel = True
        marks = [p.sequence_parallel for p in TorchNorm(config, 8).parameters()]
        found[name + " sequence parallel"] = marks
    zero_centred = tiny_gpt.model_config().transformer
    zero_centred.layernorm_zero_centered_gamma = True
    other = tiny_gpt.model_config().transformer
    other.normalization = "BatchNorm"
    for name, config in (("zero-centred", zero_centred), ("other", other)):
        found[name] = said(TorchNorm, config, 8)
    return found


def recorded() -> dict[str, int]:
    """How many microbatches the tracker has seen of layer 0 after each kind of forward pass."""
    config = tiny_gpt.model_config()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups)
    data = tiny_gpt.batch(0, 0)
    found = {}
    for name, training, gradients in (
        ("evaluation", False, True),
        ("no gradients", True, False),
        ("training", True, True),
    ):
        model.train(training)
        with torch.set_grad_enabled(gradients):
            loss = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
        if training and gradients:
            loss.mean().backward()  # which counts
        table = tiny_gpt.recorded(config.transformer)
        found[name] = 0 if table is None else int(table[0, -1])
    return found


def kept_projections(**options: Any) -> dict[str, int]:
    """Of a training forward pass: [q, k, v] of how many layers wait for backward, copies of V."""
    model = MegasinkModelBuilder(tiny_gpt.model_config(**options)).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    projections = []
    layers = model.decoder.layers[::2]
    for layer in layers:
        layer.self_attention.linear_qkv.register_forward_hook(
            lambda module, inputs, output: projections.append(
                StorageWeakRef(output[0].untyped_storage())
            )
        )
    data = tiny_gpt.batch(0, 0)
    loss = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
    kept = sum(not projection.expired() for projection in projections)
    loss.sum().backward()
    copies = sum(layer.self_attention.core_attention.frees_projection for layer in layers)
    return {"layers": len(layers), "kept": kept, "copies": copies}


def beside_upstream(variant: str, window: int | None) -> dict[str, float]:
    """Largest difference between our core attention and Megatron's own, over the largest value."""
    transformer = tiny_gpt.model_config(
        attention_variant=variant,
        head_balance_coeff=0.0,
        window_size=None if window is None else (window - 1, 0),
    ).transformer
    args = (transformer, 1, AttnMaskType.causal, "self")
    ours, theirs = CoreAttention(*args), DotProductAttention(*args)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        2.0 * torch.randn(33, 2, heads, 16, generator=generator) for heads in (4, 2, 2)
    ]  # [S, B, heads, D]
    weight = torch.randn(33, 2, 64, generator=generator)
    mask = torch.ones(33, 33, dtype=torch.bool).triu(1)[None, None]
    offset = torch.tensor([-5.0, 0.0, 2.0, 5.0])
    results = []
    for module in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if variant == "sink":
            module.softmax_offset.data.copy_(offset)
            leaves.append(module.softmax_offset)
        out = module(*leaves[:3], attention_mask=mask)
        gradients = torch.autograd.grad((out * weight).sum(), leaves)
        results.append(dict(zip(("out", "q", "k", "v", "sink"), (out, *gradients), strict=False)))
    mine, wanted = results
    return {n: float((mine[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted}
