"""Files that carry flags: a start of a run, its config.toml, recipes, grids and their measurements,
flags.txt. None runs code, sends anything, or says where to write (megasink.training.flag_file)."""

import json
import shlex

import pytest

from examples.replicate.grid.command import main as grid
from examples.replicate.tests.grid.files import FLAGS as OF_GRID
from megasink import plugins
from megasink.cli import main as megasink
from megasink.convert.hf_config import architecture_from
from megasink.convert.model_flags import as_line, model_flags
from megasink.errors import UserError
from megasink.training import launch as train_launch
from megasink.training.flag_file import toml_lines
from tests.training.command_lines import MOCK

# What a file would have the process do, as a flag and its value; ELSE is a place outside.
IMPORTS = {
    "plugin": "evil",
    "spec": ["evil", "run"],
    "adlr-autoresume": True,
    "fp8-quantizer-factory": "evil.run",
    "fp4-quantizer-factory": "evil.run",
    "trust-remote-code": True,
    "use-checkpoint-args": True,
    "yaml-cfg": "ELSE.yaml",
    "moe-layer-freq": "__import__('evil')",
}
WRITES = dict.fromkeys(
    """
    save tensorboard-dir data-cache-path wandb-save-dir config-logger-dir ckpt-convert-save
    flight-recorder-dump-path logits-save-dir memory-snapshot-path moe-routing-trace-path
    non-persistent-local-ckpt-dir non-persistent-global-ckpt-dir object-storage-cache-path
    rl-profile-dir
    """.split(),
    "ELSE",
)
SENDS = {
    "wandb-project": "mine",
    "wandb-entity": "me",
    "wandb-exp-name": "a",
    "one-logger-project": "mine",
    "data-path": "s3://bucket/text",
    "log-straggler": True,
    "run-workload-inspector-server": True,
    "enable-msc": True,
}
ATTACKS = IMPORTS | WRITES | SENDS
# Flags in the place of a value or of a name, which TOML lets be any text.
HIDDEN = {
    "equals": {"lr": "--plugin=evil"},
    "in a list": {"split": ["9,1,0", "--plugin", "evil"]},
    "in a path": {"data-path": ["1", "--save=ELSE"]},
    "in a name": {"lr=1 --plugin": "evil"},
    "as a name": {"plugin=evil": True},
    "a last word": {"window-size": ["1,0", "--", "--plugin", "evil"]},
}
MEASURES = {
    "plugin": "--plugin evil",
    "plugin=": "--plugin=evil",
    "a second output": "--output ELSE",
    "a folder of tasks": "--task-folder {run}",
    "code of a model": "--confirm-run-unsafe-code",
    "code of the hub": "--allow-download",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory whose modules leave a mark, and a trainer that stops where ranks begin.

    A rank imports the plugins of its flags, and Megatron userlib for --adlr-autoresume.
    """
    work = tmp_path / "work"
    (work / "userlib").mkdir(parents=True)
    mark = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (work / "evil.py").write_text(mark)
    (work / "userlib" / "auto_resume.py").write_text(mark)
    monkeypatch.chdir(work)
    monkeypatch.setattr(plugins, "LOADED", {})

    def launch(flags, *_):
        (tmp_path / "started").write_text(shlex.join(flags))
        plugins.load(flags)
        return 0

    monkeypatch.setattr(train_launch, "launch", launch)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {"work", "run", "ran", "started", "grid"}


def refused(place, capsys, line, *names):
    """A command is refused in one message that names the flags; nothing ran, began or was made."""
    assert megasink([str(word) for word in line]) == 2
    return told(place, capsys.readouterr().err, *names)


def refused_grid(place, path, *names):
    """As `refused`, for a grid."""
    with pytest.raises(UserError) as raised:
        grid([str(path), "--output", str(place / "grid")])
    return told(place, str(raised.value), *names)


def told(place, said, *names):
    assert any(name in said for name in names), said
    assert not {"ran", "started"} & {path.name for path in place.iterdir()}
    return said


def flags_of(place, name):
    value = ATTACKS[name]
    return {name: value.replace("ELSE", str(place / "else")) if isinstance(value, str) else value}


def toml(path, flags):
    path.write_text("".join(f"{line}\n" for line in toml_lines(flags)))
    return path


def run_of(place, *words):
    run = place / "run"
    (run / "checkpoints" / "iter_0000002").mkdir(parents=True)
    (run / "config.json").write_text('{"arguments": {}}')
    start = {"command": ["x", *MOCK, *words], "world_size": 1}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return run


def words_of(flags):
    for name, value in flags.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        yield from (f"--{name}", *values)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_resume_replays_none(place, capsys, name):
    run = run_of(place, *words_of(flags_of(place, name)))
    said = refused(place, capsys, ["train", "--run-dir", run, "--resume"], f"--{name}")
    assert "is not reused, for safety: pass it again if you trust the run" in said


@pytest.mark.parametrize("name", ATTACKS)
def test_a_recipe_sets_none(place, capsys, name):
    """Of one's own or somebody else's, by itself, included, or as the configuration of a run."""
    mine = toml(place / "work" / "mine.toml", flags_of(place, name))
    (place / "work" / "of.toml").write_text('include = "mine.toml"\nlr = 1.0\n')
    toml(run_of(place) / "config.toml", flags_of(place, name))
    for given in (["--recipe", mine], ["--recipe", "of.toml"], ["--recipe", place / "run"]):
        said = refused(place, capsys, ["train", *MOCK, *given], f"--{name}", f"{name}: give this")
        assert str(given[1]) in said or "mine.toml: " in said


@pytest.mark.parametrize("name", HIDDEN)
def test_no_flag_hides_in_another(place, capsys, name):
    flags = {
        key: [word.replace("ELSE", str(place / "else")) for word in value]
        if isinstance(value, list)
        else value
        for key, value in HIDDEN[name].items()
    }
    mine = toml(place / "work" / "mine.toml", flags)
    phrases = (
        "would be read as another flag",
        "is not a flag of megasink train",
        "is not the name of a flag",
    )
    refused(place, capsys, ["train", *MOCK, "--plugin", "json", "--recipe", mine], *phrases)
    more = "\n".join(toml_lines(flags))
    text = f'title = "a"\nseeds = [1]\nmetrics = ["lm_loss"]\n[flags]\n{more}\n'
    (place / "work" / "grid.toml").write_text(text)
    refused_grid(place, "grid.toml", *phrases)


@pytest.mark.parametrize("name", MEASURES)
def test_a_measurement_of_a_grid_is_one_of_megasinks_own(place, name):
    words = MEASURES[name].replace("ELSE", str(place / "else"))
    text = f'title = "a"\nseeds = [1]\nmetrics = ["lm_loss"]\n[flags]\n{OF_GRID}[measure.m]\n'
    (place / "work" / "grid.toml").write_text(
        f'{text}command = "analyze {{run}} --data x --output {{run}}/m {words}"\n'
    )
    said = refused_grid(place, "grid.toml", words.split()[0].partition("=")[0])
    assert "not taken from a file, for safety" in said


@pytest.mark.parametrize("key", ["hidden_act", "num_hidden_layers", "initializer_range"])
def test_a_conversion_writes_no_flag_that_a_config_hides(key):
    """`$(cat flags.txt)` takes the words of a line apart, whatever their quotes."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 64}
    config |= {"max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"]}
    assert "--plugin" not in as_line(model_flags(architecture_from(config)[0]))
    with pytest.raises((UserError, TypeError)):
        model_flags(architecture_from(config | {key: "2 --plugin evil"})[0])


def test_the_command_line_may(place, capsys):
    """Control: the same flags there reach the ranks, and a file's are replaced by them."""
    mine = toml(place / "work" / "mine.toml", {"tensorboard-dir": "x", "lr": 2})
    own = ["--tensorboard-dir", str(place / "work" / "tb"), "--lr", "1"]
    assert megasink(["train", *MOCK, "--device", "cpu", "--recipe", str(mine), *own]) == 0
    line = (place / "started").read_text()
    assert line.count("--tensorboard-dir") == 1
    assert shlex.join(own) in line
    assert not (place / "ran").exists()
    line = ["train", *MOCK, "--device", "cpu", "--recipe", str(mine), *own, "--plugin", "evil"]
    megasink(line)
    assert (place / "ran").exists()


@pytest.mark.parametrize("command", ["x --save /else", {"0": "x"}, [["x"]], ["x", 3], None])
def test_a_start_that_is_none_is_passed_over(place, capsys, command):
    run = run_of(place)
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"command": command}) + "\n")
    assert megasink(["train", "--run-dir", str(run), "--resume", "auto", "--device", "cpu"]) in (
        0,
        2,
    )
    assert "Traceback" not in capsys.readouterr().err
