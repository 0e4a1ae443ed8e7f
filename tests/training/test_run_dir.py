"""Which run may go on from which checkpoint."""

import dataclasses
import json
import shutil

import pytest

from megasink import config
from megasink.attention.variants import gate_options as gate_options
from megasink.checkpoints.model_arguments import MODEL
from megasink.checkpoints.run_tokenizer import OWN, copy_tokenizer, same_tokenizer, tokenizer_of
from megasink.cli import main as megasink
from megasink.errors import UserError
from megasink.files.output_folder import foreign_contents
from megasink.megatron.argument_parser import parse_apart
from megasink.options import run_options
from megasink.training import run_dir
from megasink.training.run_dir import folder_problem
from tests.training.command_lines import MOCK

FLAGS = [*MOCK, "--attention-variant", "sink"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with a finished checkpoint, as far as flags are concerned."""
    run = tmp_path_factory.mktemp("run")
    checkpoint = run / "checkpoints" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    args = parse_apart([*FLAGS, "--run-dir", str(run)])
    args.world_size = 1
    run_dir.write_start(args, run_dir.identity_of(args))
    return run


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--attention-variant gated", "attention_variant 'sink' -> 'gated'"),
        ("--attention-bias-type alibi", "attention_bias_type 'none' -> 'alibi'"),
        ("--residual-clip 100", "residual_clip None -> 100.0"),
        ("--prefix-lm-tokens 4", "prefix_lm_tokens 0 -> 4"),
        ("--multi-head-addition", "multi_head_addition False -> True"),
        ("--ffn-activation relu", "ffn_activation None -> 'relu'"),
        ("--num-experts 4", "num_experts None -> 4"),
        ("--moe-router-topk 3", "moe_router_topk 2 -> 3"),
        ("--num-query-groups 2 --group-query-attention", "num_query_groups 1 -> 2"),
        ("--apply-layernorm-1p", "layernorm_zero_centered_gamma False -> True"),
    ],
)
@pytest.mark.parametrize("finetune", [[], ["--finetune"]])
def test_weights_of_another_model_are_refused(saved, flags, name, finetune):
    args = parse_apart([*FLAGS, "--load", str(saved / "checkpoints"), *finetune, *flags.split()])
    (problem,) = run_dir.problems(args)
    assert "is a checkpoint of a different model: " in problem
    assert name in problem


def test_a_longer_context_needs_finetune(saved):
    longer = "--seq-length 4096 --max-position-embeddings 4096 --rotary-base 1000000".split()
    load = [*FLAGS, "--load", str(saved / "checkpoints"), *longer]
    (problem,) = run_dir.problems(parse_apart(load))
    assert "rotary_base 10000 -> 1000000" in problem
    assert problem.endswith("(--finetune allows another context)")
    assert run_dir.problems(parse_apart([*load, "--finetune"])) == []
    other = [*load, "--finetune", "--position-embedding-type", "learned_absolute"]
    assert "position_embedding_type" in run_dir.problems(parse_apart(other))[0]


def test_resuming_another_model_is_refused(saved):
    args = parse_apart([*FLAGS, "--run-dir", str(saved), "--resume", "--residual-clip", "100"])
    (problem,) = run_dir.problems(args)
    assert "holds a run with another configuration (residual_clip None -> 100.0)" in problem


def test_every_option_of_a_model_is_one_by_which_it_is_known():
    of_training = {
        *(entry.name for entry in dataclasses.fields(config.HeadBalanceOptions)),
        *(
            entry.name
            for kind in set(run_options.OPTIONS) - set(config.MODEL_OPTIONS)
            for entry in dataclasses.fields(kind)
        ),
        "attention_kernel",
        "sink_lr_mult",
        "sink_weight_decay",
    }
    options = {
        entry.name
        for module in (config, gate_options, run_options)
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__name__.endswith("Options")
        for entry in dataclasses.fields(kind)
    }
    assert options - of_training <= set(MODEL)
    known = vars(parse_apart(FLAGS))
    assert [name for name in MODEL if name not in known] == []
    json.dumps([known[name] for name in MODEL])


def started(run, *flags):
    """A start that ended before its first step."""
    args = parse_apart([*FLAGS, "--run-dir", str(run), *flags])
    args.world_size = 1
    run_dir.write_start(args, run_dir.identity_of(args))


def problems_of(run, *flags):
    return run_dir.problems(parse_apart([*FLAGS, "--run-dir", str(run), *flags]))


@pytest.mark.parametrize("metrics", [None, "", '{"iteration": 1, "lm_lo'])
def test_a_folder_without_a_finished_step_is_free_again(tmp_path, metrics):
    run = tmp_path / "run"
    started(run, "--residual-clip", "9")
    (run / "logs").mkdir()
    if metrics is not None:
        (run / "metrics.jsonl").write_text(metrics)
    assert problems_of(run) == []
    assert problems_of(run, "--resume", "auto") == []
    (problem,) = problems_of(run, "--resume")
    assert problem.endswith("has not finished a step: drop --resume to start it")
    started(run)
    config = json.loads((run / "config.json").read_text())
    assert config["identity"]["residual_clip"] is None
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2
    assert (run / "logs").is_dir()


def test_a_run_without_a_checkpoint_is_not_free(tmp_path):
    run = tmp_path / "run"
    started(run)
    (run / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 5.0}\n')
    assert "already holds a run: add --resume auto (without a checkpoint" in problems_of(run)[0]
    assert "no finished checkpoint: use --resume auto to" in problems_of(run, "--resume")[0]
    assert problems_of(run, "--resume", "auto") == []
    (problem,) = problems_of(run, "--resume", "auto", "--residual-clip", "9")
    assert "holds a run with another configuration" in problem


def test_auto_starts_from_another_checkpoint_and_goes_on_from_its_own(saved, tmp_path):
    """`--load BASE --finetune --resume auto`: BASE is for the start alone."""
    base = ["--load", str(saved / "checkpoints"), "--finetune", "--no-load-optim"]
    run = tmp_path / "run"
    assert problems_of(run, *base, "--resume", "auto") == []
    (problem,) = problems_of(run, *base[2:], "--load", str(tmp_path), "--resume", "auto")
    assert "no finished checkpoint there" in problem
    args = parse_apart([*FLAGS, "--run-dir", str(run), *base, "--resume", "auto"])
    run_dir.go_on(args)
    assert args.load == str(run / "checkpoints")
    assert (args.finetune, args.no_load_optim, args.exit_on_missing_checkpoint) == (False, None, 1)
    args = parse_apart([*FLAGS, "--run-dir", str(run), "--resume", "--no-load-optim"])
    run_dir.go_on(args)
    assert args.no_load_optim


def test_relative_data_paths_count_from_where_the_run_was_started(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    for suffix in (".bin", ".idx"):
        (there / f"text{suffix}").write_bytes(b"")
    monkeypatch.chdir(there)
    run = tmp_path / "run"
    started(run, "--data-path", "text")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    auto = ["--resume", "auto"]
    assert problems_of(run, *auto, "--data-path", "text") == []
    monkeypatch.chdir(here)
    assert problems_of(run, *auto, "--data-path", str(there / "text")) == []
    assert problems_of(run, *auto, "--data-path", "../there/text") == []
    (problem,) = problems_of(run, *auto, "--data-path", "text")
    assert "--data-path text is relative to" in problem
    assert problem.endswith(f"or pass --data-path {there / 'text'}")
    (problem,) = problems_of(run, *auto, "--data-path", "other")
    assert f"data_path ['{there / 'text'}'] -> ['{here / 'other'}']" in problem
    (problem,) = problems_of(run, "--data-path", "text")
    assert "holds a run with another configuration" in problem


def test_a_folder_that_cannot_be_written_is_one_line():
    with pytest.raises(UserError, match="--run-dir /proc/run cannot be written: "):
        started("/proc/run")


def tokenizer(folder, words):
    """A tokenizer of transformers, beside weights that are none of its files."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<eod>", "<unk>", *words])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eod>").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_a_run_holds_a_copy_of_its_tokenizer(tmp_path):
    given, run = tokenizer(tmp_path / "given", ["a", "b"]), tmp_path / "run"
    run.mkdir()
    copy_tokenizer(given, run)
    copied = {path.name for path in (run / OWN).iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= copied
    assert not any("safetensors" in name for name in copied)
    assert [path.name for path in run.iterdir()] == [OWN]
    shutil.rmtree(given)
    saved = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(given)}
    saved["padded_vocab_size"] = 128
    found = tokenizer_of(saved, None, run / "config.json")
    assert found.get_vocab() == {"<eod>": 0, "<unk>": 1, "a": 2, "b": 3}


def test_a_failed_start_leaves_no_tokenizer_to_the_next_one(tmp_path):
    run, kind = tmp_path / "run", ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    wrong, right = tokenizer(tmp_path / "one", ["a", "b"]), tokenizer(tmp_path / "two", ["c"])
    started(run, *kind, str(wrong))
    started(run, *kind, str(right))
    assert same_tokenizer(run / "config.json", "any", str(right))
    started(run, *kind, str(run / OWN))
    assert same_tokenizer(run / "config.json", "any", str(right))
    started(run)  # NullTokenizer
    assert not (run / OWN).exists()


def test_a_converted_model_is_no_run_to_go_on_with(saved, tmp_path):
    run = tmp_path / "imported"
    shutil.copytree(saved, run)
    config = json.loads((run / "config.json").read_text()) | {"converted_from": "llama"}
    (run / "config.json").write_text(json.dumps(config))
    for flags in ([], ["--resume"], ["--resume", "auto"]):
        (problem,) = problems_of(run, *flags)
        assert f"choose another folder, and add --load {run}/checkpoints --finetune" in problem


@pytest.mark.parametrize("resume", [[], ["--resume"], ["--resume", "auto"]])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            '{"architectures": ["LlamaForCausalLM"]}',
            "its config.json does not describe a run: choose",
        ),
        ('{"arguments": {}, "converted_from": "llama"}', "holds a converted model"),
        ('{"arguments": 1}', "its config.json does not describe a run"),
        ("[]", "contains a JSON list, not an object: choose another --run-dir"),
        ("{", "is not JSON"),
    ],
)
def test_a_folder_of_something_else_is_not_trained_into(tmp_path, capsys, resume, content, why):
    """By the launcher, which has written nothing by then, and by ranks of a launcher of one's own.

    Without a checkpoint or a metrics.jsonl: a folder of transformers has neither.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    (problem,) = problems_of(folder, *resume)
    assert why in problem
    assert megasink(["train", *FLAGS, "--run-dir", str(folder), *resume]) == 2
    assert why in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_text() == content


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "config.json", "model.safetensors"])
def test_a_demo_writes_into_no_folder_of_something_else(tmp_path, capsys, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert megasink(["demo", "--output", str(tmp_path)]) == 2
    assert ", not a demo: choose another folder" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


def test_a_tokenizer_is_known_by_what_it_holds(tmp_path):
    given, run = tokenizer(tmp_path / "given", ["a", "b"]), tmp_path / "run"
    run.mkdir()
    config = run / "config.json"
    other = tokenizer(tmp_path / "other", ["b", "a"])
    assert same_tokenizer(config, str(given), str(given))
    assert not same_tokenizer(config, str(given), str(other))  # a run without a copy
    assert same_tokenizer(config, None, None)
    assert not same_tokenizer(config, str(given), None)
    copy_tokenizer(given, run)
    moved = tmp_path / "moved"
    given.rename(moved)
    assert same_tokenizer(config, str(given), str(moved))
    assert same_tokenizer(config, str(given), str(run / OWN))
    assert not same_tokenizer(config, str(given), str(other))
    text = (moved / "tokenizer.json").read_text()
    (moved / "tokenizer.json").write_text(json.dumps(json.loads(text)))  # written otherwise
    assert same_tokenizer(config, str(given), str(moved))
    tokenizer(given, ["a", "c"])  # trained anew in its place
    assert not same_tokenizer(config, str(given), str(given))


def test_a_resumed_run_takes_its_own_tokenizer_where_the_other_is_gone(tmp_path):
    given, run = tokenizer(tmp_path / "given", ["a", "b"]), tmp_path / "run"
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(given)]
    started(run, *kind)
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    args = parse_apart([*FLAGS, *kind, "--run-dir", str(run), "--resume", "auto"])
    run_dir.use_own_tokenizer(args)
    assert args.tokenizer_model == str(given)
    given.rename(tmp_path / "moved")
    run_dir.use_own_tokenizer(args)
    assert args.tokenizer_model == str(run / OWN)
    assert run_dir.problems(args) == []
    tokenizer(given, ["a", "c"])
    args.tokenizer_model = str(given)
    (problem,) = run_dir.problems(args)
    assert f"the contents of tokenizer_model '{given}' have changed" in problem


def test_the_root_of_a_fresh_volume_holds_a_run(tmp_path):
    """And results; what somebody has put there does not become the system's by its name."""
    for name in ("lost+found", ".snapshot", ".Trash-1000"):
        (tmp_path / name).mkdir()
    (tmp_path / ".DS_Store").write_bytes(b"")
    assert folder_problem(tmp_path, resume=None) is None
    assert foreign_contents(tmp_path) is None
    saves = tmp_path / "checkpoints"  # may be a volume of its own, or made by who starts the run
    (saves / "lost+found").mkdir(parents=True)
    assert folder_problem(tmp_path, resume="auto") is None
    (saves / "iter_0000001").mkdir()
    assert "is not a run" in folder_problem(tmp_path, resume="auto")
    shutil.rmtree(saves)
    (tmp_path / "lost").mkdir()
    assert "is not a run" in folder_problem(tmp_path, resume=None)
    assert "contains lost," in foreign_contents(tmp_path)


def test_torchrun_does_not_start_launchers(tmp_path, capsys, monkeypatch):
    """Each would start all ranks, and all but the first find the folder in use."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert megasink(["train", *FLAGS, "--run-dir", str(tmp_path / "run")]) == 2
    assert "without torchrun and pass --ranks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
