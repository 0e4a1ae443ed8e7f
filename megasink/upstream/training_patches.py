"""Patches of Megatron's training loop and checkpoint loading.

The replacements are in training/ and checkpoints/, where they are used.
"""

from megasink.upstream.patch_register import patches

_training = patches("training", "tests/training/test_survival.py")
_loading = patches("loading", "tests/security/test_checkpoints.py")

# Megatron's training loop.
SIGNALS = _training(
    "signals of all ranks",
    "megatron.training.dist_signal_handler:DistributedSignalHandler",
    "signals_received",
    "upstream reads a number from every rank after every step; one all-reduce is enough",
    "def signals_received(self)",
    ":all_gather_item: [elem.item() for elem in output_tensors]",
)
_EVALUATE = (
    "megatron.training.training:evaluate_and_print_results: evaluate(...)",
    "megatron.training.training: "
    "def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, "
    "*_)",
    "megatron.training.training:train: evaluate_and_print_results(...)",
)
METRICS = _training(
    "metrics of steps and evaluations",
    "megatron.training.training",
    "training_log evaluate evaluate_and_print_results save_checkpoint_and_time",
    "the loop has no hook where it logs",
    "def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, "
    "report_memory_flag, skipped_iter, grad_norm, *_)",
    ":train: training_log(...)",
    *_EVALUATE,
    test="tests/training/test_observing.py",
)
EVALUATION = _training(
    "evaluations on the same samples",
    "megatron.training.training",
    "get_train_valid_test_num_samples build_pretraining_data_loader evaluate_and_print_results",
    "each evaluation starts where the last one stopped, and the last step is evaluated twice",
    "def get_train_valid_test_num_samples()",
    "megatron.training.datasets.data_samplers: "
    "def build_pretraining_data_loader(dataset, consumed_samples)",
    ":build_train_valid_test_data_loaders: "
    "build_pretraining_data_loader(valid_d, args.consumed_valid_samples)",
    *_EVALUATE,
    test="tests/training/test_evaluation.py",
)
PHASES = _training(
    "phase of each rank",
    "megatron.training.training",
    "initialize_megatron setup_model_and_optimizer build_train_valid_test_data_iterators train "
    "evaluate_and_print_results save_checkpoint_and_time training_log",
    "the loop has no hook for it",
    ":pretrain: initialize_megatron(...)",
    ":pretrain: setup_model_and_optimizer(...)",
    ":pretrain: build_train_valid_test_data_iterators(...)",
    ":pretrain: train(...)",
    ":pretrain: save_checkpoint_and_time(...)",
    ":train: training_log(...)",
    ":train: evaluate_and_print_results(...)",
)
FAULT_TOLERANCE = _training(
    "one parse of the command line",
    "megatron.training.ft_integration",
    "setup",
    "it parses all flags again to check for --enable-ft-package, which megasink refuses",
    "def setup()",
    ":setup: args = arguments.parse_args(ignore_unknown_args=True)",
    "megatron.training.training:pretrain: ft_integration.setup()",
    test="tests/training/test_launch.py",
)
OPTIMIZER_GROUPS = _training(
    "parameter group of the sink parameters",
    "megatron.training.training",
    "get_megatron_optimizer_config",
    "the loop sets config_overrides itself, though users are meant to extend them",
    "def get_megatron_optimizer_config(args)",
    ":setup_model_and_optimizer: config, config_overrides = get_megatron_optimizer_config(args)",
    test="tests/training/test_optimizer.py",
)
MATRIX_SHARDS = _training(
    "whole matrices for Muon's distributed optimizer",
    "megatron.training.models.dist_utils",
    "_ddp_wrap DistributedOptimizer",
    "a builder gives a model buffers for Adam's shards, which cut matrices; get_model does not",
    ":_ddp_wrap: DistributedOptimizer.compute_full_param_layout(...)",
    ":prepare_existing_model_chunks_for_distributed_training: _ddp_wrap(...)",
    "megatron.training.training:wrap_model_chunks_with_ddp: "
    "tag_params_for_buffer_routing(model_chunks)",
    test="tests/training/test_muon.py",
    fixed_in="0.20",
)
HYBRID_COUNTS = _training(
    "layer counts in the logs of a hybrid model",
    "megatron.training.training",
    "is_hybrid_model, there and in megatron.training.theoretical_memory_usage",
    "ranks without experts expect one loss per E layer, the other ranks one per layer; memory is "
    "not estimated",
    ":training_log: is_hybrid_model(args)",
    ":num_floating_point_operations: is_hybrid_model(args)",
    "megatron.training.theoretical_memory_usage:report_theoretical_memory: is_hybrid_model(args)",
    test="tests/training/test_hybrid_model.py",
)
WHOLE_CHECKPOINTS = _training(
    "no overwriting of intact checkpoints",
    "megatron.training.training",
    "save_checkpoint",
    "an iteration is saved again if the next step gives NaN or Inf",
    "megatron.training.checkpointing: def save_checkpoint(iteration, *_)",
    ":save_checkpoint_and_time: save_checkpoint(...)",
)
RETAINED_CHECKPOINTS = _training(
    "no deletion before the newer checkpoint is intact",
    "megatron.training.checkpointing",
    "_async_delete_checkpoint_impl",
    "--save-retain-interval deletes the previous checkpoint file by file without checking the new "
    "one, so a kill leaves half a checkpoint under its name",
    "def _async_delete_checkpoint_impl(save_path, iteration_to_delete, log_progress, "
    "lower_priority, cpu_priority, io_priority)",
    ":save_checkpoint: th = threading.Thread(target=_async_delete_checkpoint_impl, "
    "args=(args.save, prev_iteration, args.log_progress))",
    test="tests/training/test_checkpoints_command.py",
)
FOREIGN_CHECKPOINTS = _training(
    "checkpoints that megasink did not write",
    "megatron.core.dist_checkpointing",
    "load",
    "a non-strict load would accept a missing weight too",
    "megatron.core.dist_checkpointing.serialization: "
    "def load(sharded_state_dict, checkpoint_dir, *_)",
    "megatron.training.checkpointing:_load_global_dist_base_checkpoint: "
    "dist_checkpointing.load(...)",
    test="tests/training/test_end_to_end.py",
)
GPT_CHECKPOINTS = _training(
    "GPT checkpoints in hybrid models",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "gpt_compatible_layer_maps retarget_sharded_state_dict_to_gpt_checkpoint",
    "it expects stacked layers, and refuses patterns with both FFN and experts, or with "
    "multi-token prediction",
    "def gpt_compatible_layer_maps(hybrid_layer_pattern)",
    "def retarget_sharded_state_dict_to_gpt_checkpoint(sharded_state_dict, layer_maps)",
    "megatron.training.checkpointing:_maybe_setup_gpt_to_hybrid_load: "
    "layer_maps = gpt_compatible_layer_maps(args.hybrid_layer_pattern)",
    "megatron.training.checkpointing:load_checkpoint: "
    "retarget_sharded_state_dict_to_gpt_checkpoint(sub_sd, gpt_compat_layer_maps)",
    test="tests/training/test_hybrid_runs.py",
)
RESULTS_QUEUE = _training(
    "result queue of checkpoint writers",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "_results_queue",
    "the process that upstream starts for it outlives a killed rank",
    ":get_write_results_queue: _results_queue = ctx.Manager().Queue()",
)
CHECKPOINT_WRITER = _training(
    "writer of asynchronous checkpoints",
    "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller",
    "async_loop schedule_async_call",
    "upstream's writer outlives its rank; a rank waits forever if its writer was killed",
    "def schedule_async_call(self, async_req)",
    "def async_loop(rank, queue, preload_q, comp_q, *_)",
    ":PersistentAsyncCaller.schedule_async_call: self._persistent_preload_q.join()",
)
PRELOADED_TENSORS = _training(
    "copies of a checkpoint's tensors",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync",
    "preload_tensors",
    "tensors already on the CPU are not copied, and training changes them meanwhile",
    ":FileSystemWriterAsync.preload_tensors: tensor.to('cpu', non_blocking=non_blocking)",
    test="tests/training/test_checkpoint_writer.py",
)
HELP = _training(
    "help texts of Megatron's flags",
    "megatron.training.argument_utils:ArgumentGroupFactory",
    "_get_field_docstrings",
    "upstream parses the source of its dataclasses at every start, though only --help needs it",
    "def _get_field_docstrings(self, src_cfg_class)",
    test="tests/test_mistakes.py",
)

# Loading checkpoints without running code from the files.
METADATA = _loading(
    "index of a checkpoint",
    "torch.distributed.checkpoint.filesystem:FileSystemReader",
    "read_metadata",
    "upstream unpickles it",
    ":FileSystemReader.read_metadata: pickle.load(metadata_file)",
)
ENTRIES = _loading(
    "non-tensor entries of a checkpoint",
    "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner",
    "load_bytes",
    "common, random and extra states are unpickled; an error names the entry",
    "def load_bytes(self, read_item, value)",
    ":DefaultLoadPlanner.load_bytes: torch.load(value, weights_only=False)",
)
TORCH_LOAD = _loading(
    "torch.load",
    "torch",
    "load",
    "the caller or TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD may let it run code",
    "torch.serialization: def load(f, map_location, pickle_module, *_)",
)
FP8_STATES = _loading(
    "FP8 states",
    "transformer_engine.pytorch.module.base",
    "pickle, there and wherever TransformerEngine imports it",
    "upstream unpickles or refuses the states of delayed scaling, which a resumed FP8 run needs",
    ": pickle.loads(...)",
)
