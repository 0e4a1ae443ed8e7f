"""Patches of Megatron's training loop and checkpoint loading.

The replacements are in train/ and checkpoint/, where they are used.
"""

from megasink.upstream.register import Patch
from megasink.upstream.source import Quote as Q

_TRAINING = "megatron.training.training"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"

# Megatron's training loop.
SIGNALS = Patch(
    "signals of all ranks",
    "training",
    "megatron.training.dist_signal_handler.DistributedSignalHandler",
    "signals_received",
    "it reads a number from every rank after every step; one all-reduce says which signal it was",
    (
        Q(
            "megatron.training.dist_signal_handler:DistributedSignalHandler",
            "def signals_received(self)",
        ),
        Q(
            "megatron.training.dist_signal_handler:all_gather_item",
            "[elem.item() for elem in output_tensors]",
        ),
    ),
    "tests/train/test_survival.py",
)
_LOG = (
    Q(
        _TRAINING,
        "def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, "
        "report_memory_flag, skipped_iter, grad_norm, *_)",
    ),
    Q(f"{_TRAINING}:train", "training_log(...)"),
)
_EVALUATE = (
    Q(f"{_TRAINING}:evaluate_and_print_results", "evaluate(...)"),
    Q(
        _TRAINING,
        "def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, "
        "iteration, *_)",
    ),
    Q(f"{_TRAINING}:train", "evaluate_and_print_results(...)"),
)
OBSERVER = Patch(
    "observer of steps and evaluations",
    "training",
    _TRAINING,
    "training_log evaluate evaluate_and_print_results",
    "the loop has no hook for what it logs",
    (*_LOG, *_EVALUATE),
    "tests/train/test_observing.py",
)
EVALUATION = Patch(
    "evaluations on the same samples",
    "training",
    _TRAINING,
    "get_train_valid_test_num_samples build_pretraining_data_loader evaluate_and_print_results",
    "each evaluation reads on from the one before it, and the last step is evaluated twice",
    (
        Q(_TRAINING, "def get_train_valid_test_num_samples()"),
        Q(
            "megatron.training.datasets.data_samplers",
            "def build_pretraining_data_loader(dataset, consumed_samples)",
        ),
        Q(
            f"{_TRAINING}:build_train_valid_test_data_loaders",
            "build_pretraining_data_loader(valid_d, args.consumed_valid_samples)",
        ),
        *_EVALUATE,
    ),
    "tests/train/test_evaluation.py",
)
PHASES = Patch(
    "what a rank is doing",
    "training",
    _TRAINING,
    "initialize_megatron setup_model_and_optimizer build_train_valid_test_data_iterators train "
    "evaluate_and_print_results save_checkpoint_and_time training_log",
    "the loop does not tell",
    (
        Q(f"{_TRAINING}:pretrain", "initialize_megatron(...)"),
        Q(f"{_TRAINING}:pretrain", "setup_model_and_optimizer(...)"),
        Q(f"{_TRAINING}:pretrain", "build_train_valid_test_data_iterators(...)"),
        Q(f"{_TRAINING}:pretrain", "train(...)"),
        Q(f"{_TRAINING}:pretrain", "save_checkpoint_and_time(...)"),
        *_LOG[1:],
        *_EVALUATE[2:],
    ),
    "tests/train/test_survival.py",
)
OPTIMIZER_GROUPS = Patch(
    "parameter group of the sinks",
    "training",
    _TRAINING,
    "get_megatron_optimizer_config",
    "the loop fills config_overrides itself, and says that users may add to them",
    (
        Q(_TRAINING, "def get_megatron_optimizer_config(args)"),
        Q(
            f"{_TRAINING}:setup_model_and_optimizer",
            "config, config_overrides = get_megatron_optimizer_config(args)",
        ),
    ),
    "tests/train/test_optimizer.py",
)
WHOLE_CHECKPOINTS = Patch(
    "whole checkpoints are kept",
    "training",
    _TRAINING,
    "save_checkpoint",
    "an iteration is saved twice where the step after it gave NaN or Inf",
    (
        Q("megatron.training.checkpointing", "def save_checkpoint(iteration, *_)"),
        Q(f"{_TRAINING}:save_checkpoint_and_time", "save_checkpoint(...)"),
    ),
    "tests/train/test_survival.py",
)
FOREIGN_CHECKPOINTS = Patch(
    "checkpoints that no run of megasink wrote",
    "training",
    "megatron.core.dist_checkpointing",
    "load",
    "a non-strict load would accept a missing weight too",
    (
        Q(
            "megatron.core.dist_checkpointing.serialization",
            "def load(sharded_state_dict, checkpoint_dir, *_)",
        ),
        Q(
            "megatron.training.checkpointing:_load_global_dist_base_checkpoint",
            "dist_checkpointing.load(...)",
        ),
    ),
    "tests/train/test_end_to_end.py",
)
RESULTS_QUEUE = Patch(
    "queue of a checkpoint's writers",
    "training",
    f"{_STRATEGIES}.filesystem_async",
    "_results_queue",
    "the process that upstream starts for it lives on after a kill",
    (
        Q(
            f"{_STRATEGIES}.filesystem_async:get_write_results_queue",
            "_results_queue = ctx.Manager().Queue()",
        ),
    ),
    "tests/train/test_survival.py",
)
CHECKPOINT_WRITER = Patch(
    "writer of asynchronous checkpoints",
    "training",
    f"{_STRATEGIES}.async_utils.PersistentAsyncCaller",
    "async_loop schedule_async_call",
    "upstream's outlives its rank, dies of the rank's signals, and is waited for without end",
    (
        Q(
            f"{_STRATEGIES}.async_utils:PersistentAsyncCaller",
            "def schedule_async_call(self, async_req)",
        ),
        Q(
            f"{_STRATEGIES}.async_utils:PersistentAsyncCaller",
            "def async_loop(rank, queue, preload_q, comp_q, *_)",
        ),
        Q(
            f"{_STRATEGIES}.async_utils:PersistentAsyncCaller.schedule_async_call",
            "self._persistent_preload_q.join()",
        ),
    ),
    "tests/train/test_survival.py",
)
PRELOADED_TENSORS = Patch(
    "copies of a checkpoint's tensors",
    "training",
    f"{_STRATEGIES}.filesystem_async.FileSystemWriterAsync",
    "preload_tensors",
    "tensors that are on the CPU already are not copied, and training changes them meanwhile",
    (
        Q(
            f"{_STRATEGIES}.filesystem_async:FileSystemWriterAsync.preload_tensors",
            "tensor.to('cpu', non_blocking=non_blocking)",
        ),
    ),
    "tests/train/test_checkpoint_writer.py",
)
FLAG_SOURCES = Patch(
    "source files of Megatron's flags",
    "training",
    "megatron.training.argument_utils.ArgumentGroupFactory",
    "_get_field_docstrings",
    "python -m megasink.train.flag_table notes which dataclasses flags are made from",
    (
        Q(
            "megatron.training.argument_utils:ArgumentGroupFactory",
            "def _get_field_docstrings(self, src_cfg_class)",
        ),
    ),
    "tests/test_mistakes.py",
)

# Loading checkpoints without running code from the files.
METADATA = Patch(
    "index of a checkpoint",
    "loading",
    "torch.distributed.checkpoint.filesystem.FileSystemReader",
    "read_metadata",
    "it is unpickled",
    (
        Q(
            "torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata",
            "pickle.load(metadata_file)",
        ),
    ),
    "tests/security/test_checkpoints.py",
)
ENTRIES = Patch(
    "entries that are no tensors",
    "loading",
    "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner",
    "load_bytes",
    "common state, random and extra states are unpickled: their name is noted for the refusal",
    (
        Q(
            "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner",
            "def load_bytes(self, read_item, value)",
        ),
        Q(
            "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
            "torch.load(value, weights_only=False)",
        ),
    ),
    "tests/security/test_checkpoints.py",
)
TORCH_LOAD = Patch(
    "torch.load",
    "loading",
    "torch",
    "load",
    "it is safe unless the caller or TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD says otherwise",
    (Q("torch.serialization", "def load(f, map_location, pickle_module, *_)"),),
    "tests/security/test_checkpoints.py",
)
FP8_STATES = Patch(
    "states of FP8",
    "loading",
    "transformer_engine.pytorch.module.base",
    "pickle, there and wherever TransformerEngine imports it",
    "they are unpickled; no run here has any",
    (Q("transformer_engine.pytorch.module.base", "pickle.loads(...)"),),
    "tests/security/test_checkpoints.py",
)
