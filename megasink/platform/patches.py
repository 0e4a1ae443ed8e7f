"""Patches of the CPU platform, and the upstream lines that make them necessary.

The replacements are in cuda_api.py, devices.py and megatron_core.py.
"""

from megasink.upstream.register import Patch
from megasink.upstream.source import Quote as Q

_TRAINING = "megatron.training.training"
_RANDOM = "megatron.core.tensor_parallel.random"
_PATCHES_TEST = "tests/platform/test_patches.py"
_PLATFORM_TEST = "tests/platform/test_platform.py"

COMPILE = Patch(
    "no torch.compile",
    "platform",
    "torch._dynamo.config",
    "disable",
    "each small function would start a C++ compiler in every rank",
    (Q("megatron.core.jit:enable_jit_fuser", "jit_fuser = torch.compile"),),
    _PLATFORM_TEST,
)
QUERIES = Patch(
    "device queries",
    "platform",
    "torch.cuda",
    "is_available device_count current_device set_device get_device_properties synchronize",
    "they ask the driver",
    (
        Q("megatron.training.initialize:initialize_megatron", "torch.cuda.is_available()"),
        Q("megatron.training.initialize:_initialize_distributed", "torch.cuda.device_count()"),
        Q("megatron.training.initialize:_initialize_distributed", "torch.cuda.set_device(...)"),
        Q(
            "megatron.training.utils.common_utils:get_device_arch_version",
            "torch.cuda.get_device_properties(...)",
        ),
        Q("megatron.core.timers:Timer.stop", "torch.cuda.synchronize()"),
    ),
    _PATCHES_TEST,
)
MEMORY = Patch(
    "memory statistics",
    "platform",
    "torch.cuda",
    "memory_stats memory.memory_stats",
    "what is in use is the resident memory of the process",
    (Q(f"{_TRAINING}:training_log", "torch.cuda.memory_stats()"),),
    _PATCHES_TEST,
)
STREAMS = Patch(
    "streams",
    "platform",
    "torch.cuda",
    "Stream current_stream stream",
    "the CPU has one order of work",
    (Q(f"{_TRAINING}:get_model", "ddp_stream.wait_stream(torch.cuda.current_stream())"),),
    _PATCHES_TEST,
)
RANDOM = Patch(
    "random states",
    "platform",
    "torch.cuda",
    "get_rng_state get_rng_state_all set_rng_state manual_seed manual_seed_all seed seed_all "
    "initial_seed and those of torch.cuda.random",
    "dropout draws from the CPU generator",
    (
        Q(f"{_RANDOM}:CudaRNGStatesTracker.add", "torch.cuda.manual_seed(seed)"),
        Q("megatron.training.checkpointing:get_rng_state", "torch.cuda.get_rng_state()"),
    ),
    _PATCHES_TEST,
)
ACCELERATOR = Patch(
    "accelerator query",
    "platform",
    "torch.accelerator",
    "is_available",
    "where torch is built for CUDA it says yes by the build, and the driver is asked next",
    (
        Q(
            "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
            "loader.pin_memory and torch.accelerator.is_available()",
        ),
    ),
    _PATCHES_TEST,
)
FACTORIES = Patch(
    "tensors made on CUDA",
    "platform",
    "torch",
    "each factory, and those of torch.fft, torch.nested and torch.Tensor",
    "they are made on the CPU",
    (
        Q(
            f"{_TRAINING}:pretrain",
            "torch.tensor([_LEGACY_TRAIN_START_TIME], dtype=torch.double, device='cuda')",
        ),
    ),
    _PLATFORM_TEST,
)
GENERATOR = Patch(
    "generators on CUDA",
    "platform",
    "torch",
    "Generator",
    "it draws numbers for tensors on the CPU",
    (
        Q(
            "megatron.core.inference.text_generation_controllers.text_generation_controller",
            "torch.Generator(device=torch.cuda.current_device())",
        ),
    ),
    _PATCHES_TEST,
)
CONTEXT = Patch(
    "device contexts",
    "platform",
    "torch.utils._device.DeviceContext",
    "__init__",
    "what is made without a device is on the CPU there, too",
    (
        Q("torch.utils._device:DeviceContext", "def __init__(self, device)"),
        Q("torch.utils._device:DeviceContext.__init__", "torch.device(device)"),
    ),
    _PATCHES_TEST,
)
MOVES = Patch(
    "moves to CUDA",
    "platform",
    "torch.Tensor",
    "to cuda",
    "tensors stay on the CPU",
    (Q(f"{_TRAINING}:get_model", "model_module.cuda(torch.cuda.current_device())"),),
    _PATCHES_TEST,
)
TENSOR_TYPE = Patch(
    "names of tensor types",
    "platform",
    "torch.Tensor",
    "type",
    "Megatron asserts, or branches on, the name of a CUDA tensor",
    (
        Q(
            "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
            "param.grad.type() == 'torch.cuda.FloatTensor'",
        ),
        Q(
            "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
            "param.type() == 'torch.cuda.FloatTensor'",
        ),
    ),
    _PATCHES_TEST,
)
RNG_TRACKER = Patch(
    "generator of the tracker",
    "platform",
    _RANDOM,
    "_get_cuda_rng_state _set_cuda_rng_state",
    "it is the CPU's default generator",
    (
        Q(_RANDOM, "def _get_cuda_rng_state(device, clone, graph_safe)"),
        Q(_RANDOM, "def _set_cuda_rng_state(new_state, device, graph_safe)"),
    ),
    _PATCHES_TEST,
)
FORK_WARNING = Patch(
    "warning of a moved generator",
    "platform",
    _RANDOM,
    "filters of its logger",
    "inside fork() the CPU generator moves by design",
    (
        Q(
            f"{_RANDOM}:CudaRNGStatesTracker.fork",
            "logging.getLogger(__name__).warning('CPU RNG state changed within GPU RNG context')",
        ),
    ),
    _PLATFORM_TEST,
)
LOADER = Patch(
    "pinned memory",
    "platform",
    "torch.utils.data",
    "DataLoader",
    "Megatron asks for it, and torch warns at every loader that there is none",
    (
        Q(
            "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
            "torch.utils.data.DataLoader(...)",
        ),
    ),
    _PATCHES_TEST,
)
EXPERTS = Patch(
    "sizes of messages to experts",
    "platform",
    "megatron.core.transformer.moe.token_dispatcher",
    "maybe_move_tensor_to_cpu",
    "they become numbers only where they come from a CUDA tensor",
    (
        Q(
            "megatron.core.transformer.moe.moe_utils",
            "def maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)",
        ),
        Q(
            "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            "torch.is_tensor(tensor) and tensor.is_cuda",
        ),
    ),
    _PATCHES_TEST,
)
