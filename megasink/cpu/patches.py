"""Patches of the CPU platform, and the upstream lines that make them necessary.

The replacements are in cuda_api.py, devices.py and megatron_core.py.
"""

from megasink.upstream.patch_register import patches

_patch = patches("platform", "tests/cpu/test_patches.py")

COMPILE = _patch(
    "no torch.compile",
    "torch._dynamo.config",
    "disable",
    "each small function would start a C++ compiler in every rank",
    "megatron.core.jit:enable_jit_fuser: jit_fuser = torch.compile",
    test="tests/cpu/test_platform.py",
)
QUERIES = _patch(
    "device queries",
    "torch.cuda",
    "is_available device_count current_device set_device get_device_properties synchronize",
    "they query the driver",
    "megatron.training.initialize:initialize_megatron: torch.cuda.is_available()",
    "megatron.training.initialize:_initialize_distributed: torch.cuda.device_count()",
    "megatron.training.initialize:_initialize_distributed: torch.cuda.set_device(...)",
    "megatron.training.utils.common_utils:get_device_arch_version: "
    "torch.cuda.get_device_properties(...)",
    "megatron.core.timers:Timer.stop: torch.cuda.synchronize()",
)
MEMORY = _patch(
    "memory statistics",
    "torch.cuda",
    "memory_stats memory.memory_stats",
    "the resident memory of the process replaces GPU memory",
    "megatron.training.training:training_log: torch.cuda.memory_stats()",
)
STREAMS = _patch(
    "streams",
    "torch.cuda",
    "Stream current_stream stream is_current_stream_capturing",
    "the CPU runs operations in order",
    "megatron.training.training:get_model: ddp_stream.wait_stream(torch.cuda.current_stream())",
)
PIPELINE = _patch(
    "pipeline messages",
    "megatron.core.pipeline_parallel.p2p_communication",
    "_batched_p2p_ops",
    "with interleaved stages on two ranks, two messages between the same ranks arrive swapped",
    ":_batched_p2p_ops: torch.distributed.batch_isend_irecv(ops)",
    ":_p2p_ops: even_recv_odd_send_group = torch.distributed.group.WORLD",
    test="tests/distributed/test_layouts.py",
)
PIPELINE_SHAPES = _patch(
    "shapes of pipeline messages",
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
    "_communicate_shapes",
    PIPELINE.reason,
    "def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)",
    ":P2PCommunicator._communicate_shapes: torch.distributed.batch_isend_irecv(ops)",
    test="tests/distributed/test_layouts.py",
)
RANDOM = _patch(
    "random states",
    "torch.cuda",
    "get_rng_state get_rng_state_all set_rng_state manual_seed manual_seed_all seed seed_all "
    "initial_seed and those of torch.cuda.random",
    "dropout draws from the CPU generator",
    "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.add: torch.cuda.manual_seed(seed)",
    "megatron.training.checkpointing:get_rng_state: torch.cuda.get_rng_state()",
)
ACCELERATOR = _patch(
    "accelerator query",
    "torch.accelerator",
    "is_available",
    "a CUDA build of torch returns True without a device, and then queries the driver",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__: "
    "loader.pin_memory and torch.accelerator.is_available()",
)
FACTORIES = _patch(
    "tensor factories",
    "torch",
    "each factory, and those of torch.fft, torch.nested and torch.Tensor",
    "tensors are created on the CPU",
    "megatron.training.training:pretrain: "
    "torch.tensor([_LEGACY_TRAIN_START_TIME], dtype=torch.double, device='cuda')",
    test="tests/cpu/test_platform.py",
)
GENERATOR = _patch(
    "random generators",
    "torch",
    "Generator",
    "they are used for tensors on the CPU",
    "megatron.core.inference.text_generation_controllers.text_generation_controller: "
    "torch.Generator(device=torch.cuda.current_device())",
)
CONTEXT = _patch(
    "device contexts",
    "torch.utils._device:DeviceContext",
    "__init__",
    "inside them, tensors without a device are created on the CPU",
    "def __init__(self, device)",
    ":DeviceContext.__init__: torch.device(device)",
)
MOVES = _patch(
    "moves to CUDA",
    "torch:Tensor",
    "to cuda",
    "tensors stay on the CPU",
    "megatron.training.training:get_model: model_module.cuda(torch.cuda.current_device())",
)
TENSOR_TYPE = _patch(
    "tensor type names",
    "torch:Tensor",
    "type",
    "Megatron checks for the name of a CUDA tensor type",
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32: "
    "param.grad.type() == 'torch.cuda.FloatTensor'",
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__: "
    "param.type() == 'torch.cuda.FloatTensor'",
)
RNG_TRACKER = _patch(
    "generator of the RNG tracker",
    "megatron.core.tensor_parallel.random",
    "_get_cuda_rng_state _set_cuda_rng_state",
    "it is the CPU's default generator",
    "def _get_cuda_rng_state(device, clone, graph_safe)",
    "def _set_cuda_rng_state(new_state, device, graph_safe)",
)
FORK_WARNING = _patch(
    "warning about the CPU generator",
    "megatron.core.tensor_parallel.random",
    "filters of its logger",
    "here fork() advances the CPU generator by design",
    ":CudaRNGStatesTracker.fork: "
    "logging.getLogger(__name__).warning('CPU RNG state changed within GPU RNG context')",
    test="tests/cpu/test_platform.py",
)
LOADER = _patch(
    "pinned memory",
    "torch.utils.data",
    "DataLoader",
    "Megatron requests pinned memory, which a CPU lacks, so torch would warn for every loader",
    "megatron.training.datasets.data_samplers:build_pretraining_data_loader: "
    "torch.utils.data.DataLoader(...)",
)
EXPERTS = _patch(
    "message sizes for experts",
    "megatron.core.transformer.moe.token_dispatcher",
    "maybe_move_tensor_to_cpu",
    "Megatron converts the sizes to numbers only if they come from a CUDA tensor",
    "megatron.core.transformer.moe.moe_utils: "
    "def maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)",
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu: "
    "torch.is_tensor(tensor) and tensor.is_cuda",
)
DELTA_NET = _patch(
    "gated delta-net",
    "megatron.core.ssm.gated_delta_net.common",
    "HAVE_FLA l2norm",
    "the norm of queries and keys is a Triton kernel",
    ":_GDNBase.__init__: not HAVE_FLA",
    ":_GDNBase._prepare_input_for_gated_delta_rule: query_key = l2norm(query_key.contiguous())",
    test="tests/megatron/test_hybrid.py",
)
DELTA_RULE = _patch(
    "gated delta rule",
    "megatron.core.ssm.gated_delta_net.gdn",
    "causal_conv1d chunk_gated_delta_rule",
    "they are Triton kernels; Megatron uses torch instead only in deterministic mode",
    ":GatedDeltaNet._setup_variant_attrs: self.gated_delta_rule = chunk_gated_delta_rule",
    ":GatedDeltaNet.forward: causal_conv1d(...)",
    test="tests/megatron/test_hybrid.py",
)
