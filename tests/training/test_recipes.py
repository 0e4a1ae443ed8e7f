"""Recipes: what their files may say, what becomes of them, and that every one of them can train."""

import json
import re
import sys
import tempfile
import tomllib
from argparse import Namespace

import pytest

from megasink.cli import main as megasink
from megasink.errors import ConfigError, UserError
from megasink.megatron.argument_parser import known_flags
from megasink.plan import run_plan as plan_launch
from megasink.training import launch, preflight, recipes, run_dir
from megasink.training.checks import all_checks
from megasink.training.ffn_width import matched_ffn_width, parameters_per_layer
from megasink.training.flag_file import flag_words, toml_lines
from tests.documented import ROOT
from tests.forkserver import server
from tests.parsing import read
from tests.runs import MOCK

DOCS = (ROOT / "docs" / "recipes.md").read_text()
SOURCES = (ROOT / "megasink" / "training" / "recipes" / "README.md").read_text()
# Those of papers; README's `tiny` is run there.
MODELS = [name for name in recipes.shipped() if "muon" not in name and name != "tiny"]
# As the columns of the exports are called.
VARIANTS = {name: f"--attention-variant {name}" for name in ("vanilla", "sink", "gated")}
VARIANTS["gated, elementwise"] = f"{VARIANTS['gated']} --gate-granularity elementwise"
LOSS = ("0", "1e-4")
# What the papers print: tokens, and parameters with and without the embeddings.
TOKENS = {
    **{"p0-0.6b": 11.2e9, "p0-1b": 21.6e9, "p0-2b": 37.6e9, "p0-0.6b-export": 11.2e9},
    **{"p1-1.7b-28l": 400e9, "p1-1.7b-28l-3.5t": 3.5e12, "p1-1.7b-48l": 400e9},
    **{"p1-1.7b-48l-1t": 1e12, "p1-long-32k": 80e9},
    "p1-15a2b": 100_000 * 1024 * 4096,  # its steps and batch; the "400B" of Table 1 is rounded
    **{"p2-60m": 20_000 * 2**20, "p2-1b": 40_000 * 2**20},
}
COUNTED = ("p0-0.6b", "p0-1b", "p0-2b", "p0-0.6b-export", "p1-1.7b-28l", "p1-1.7b-48l", "p1-15a2b")
COUNTED += ("p2-60m", "p2-1b")
# They need TransformerEngine, which is not here.
_OF_A_GPU = ("--moe-grouped-gemm", "--moe-permute-fusion")
PRINTED = {"p0-0.6b": 0.561, "p0-1b": 1.082, "p0-2b": 1.879, "p1-1.7b-28l": 1.7, "p1-1.7b-48l": 1.7}


def documented(heading):
    """{recipe: cells} of the table under a heading of docs/recipes.md; several recipes a row."""
    table = DOCS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = {}
    for line in re.findall(r"^\| `(?:.*)\|$", table, re.M):
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows |= dict.fromkeys(re.findall(r"`([\w.-]+)`", first), cells)
    return rows


def words(name, *flags):
    vocabulary = {"p0": 65536, "p1": 151936, "p2": 50432}[name[:2]]
    null = [
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--num-workers",
        "0",
        "--device",
        "cpu",
    ]
    null += ["--vocab-size", str(vocabulary)]
    return recipes.expanded(["--recipe", name, *null, *flags])


def whole_model(name):
    one = ["--context-parallel-size", "1", "--expert-model-parallel-size", "1"]
    return words(name, "--attention-variant", "vanilla", *one)


@pytest.fixture(scope="module")
def answers():
    """Of one process: problems of each line as on that many ranks, and its export; parameters."""
    layouts = documented("Layouts")
    lines = {
        (name, variant, loss): (
            words(name, *flags.split(), "--head-balance-coeff", loss),
            int(layouts[name][0]),
        )
        for name in MODELS
        for variant, flags in VARIANTS.items()
        for loss in LOSS
    }
    for name, (ranks, *layout) in layouts.items():
        for cell in layout:
            added = [flag for flag in cell.strip("`").split() if flag not in _OF_A_GPU]
            lines[name, cell] = words(name, *(added if cell != "none" else [])), int(ranks)
    models = {name: whole_model(name) for name in COUNTED}
    with tempfile.TemporaryFile("w+") as given:
        json.dump({"lines": list(lines.values()), "models": models}, given)
        given.seek(0)
        result = server().run(["tests.training.recipe_worker"], stdin=given)
    assert result.returncode == 0, result.stderr[-3000:]
    answer = json.loads(result.stdout.splitlines()[-1])  # a fork logs there too
    return dict(zip(lines, answer["lines"], strict=True)), answer["models"]


def test_every_recipe_variant_loss_and_layout_is_accepted(answers):
    """By our checks and by all of Megatron's, for the stated number of ranks."""
    lines, _ = answers
    assert {line: problems for line, (problems, _) in lines.items() if problems} == {}
    assert len(lines) >= 8 * len(MODELS)


def test_every_recipe_exports_as_the_page_says_or_is_refused_by_name(answers):
    exports = documented("Exports")
    assert set(exports) == set(MODELS)
    for name, cells in exports.items():
        found = [answers[0][name, variant, "0"][1] for variant in VARIANTS]
        if not cells[0].startswith("refused: "):
            assert [cell.strip("`") for cell in cells] == found, name
        else:
            assert "--skip-train" in words(name)  # it writes no checkpoint to export


def test_parameters_are_those_of_the_papers_and_of_the_page(answers):
    _, models = answers
    for name, billions in PRINTED.items():
        digits = len(str(billions).partition(".")[2])
        assert round(models[name][0] / 1e9, digits) == billions, name
    assert round((models["p2-60m"][0] - models["p2-60m"][1]) / 1e6) == 59  # "approximately 60M"
    sizes = documented("The recipes")
    for name, counts in models.items():
        assert [int(cell.replace(",", "")) for cell in sizes[name][1:3]] == [*counts], name


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_paper(name):
    args = read(words(name))
    if args.skip_train:
        assert name == "p1-yarn-128k"
        return
    tokens = args.train_iters * args.global_batch_size * args.seq_length
    assert tokens == pytest.approx(TOKENS[name], rel=3e-3)
    sizes = documented("The recipes")[name]
    assert int(sizes[3].replace(",", "")) == args.train_iters
    assert float(sizes[4]) == round(tokens / 1e9, 1)


@pytest.mark.parametrize(("name", "width"), [("p1-1.7b-28l", 5504), ("p1-1.7b-48l", 3968)])
def test_the_ffn_of_a_gated_model_is_as_wide_as_the_page_says(name, width):
    flags = ["--attention-variant", "gated", "--gate-granularity", "elementwise"]
    args = read(words(name, *flags))
    extra = args.hidden_size * args.num_attention_heads * args.kv_channels
    matched = matched_ffn_width(
        args.ffn_hidden_size, extra, args.hidden_size, gated_linear_unit=True
    )
    assert (matched.after, extra) == (width, parameters_per_layer(args))
    assert f"{width} of {args.ffn_hidden_size}" in SOURCES
    assert f"{matched.left_over:,}" in SOURCES


def test_every_flag_exists_and_every_recipe_is_on_the_page():
    known = known_flags()
    assert known
    for name in recipes.shipped():
        assert recipes.read(name, known).about
    assert set(documented("The recipes")) == set(MODELS)
    assert set(documented("Layouts")) == set(MODELS)
    assert "`tiny`" in DOCS


def write(folder, text, name="mine.toml"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_later_files_and_the_command_line_count_more(tmp_path):
    lines = (
        'include = "p2-60m"',
        "lr = 1e-3",
        "swiglu = false",
        'recompute-modules = ["mlp", "moe"]',
    )
    mine = write(tmp_path, "\n".join(lines))
    other = write(tmp_path, "lr = 2e-3\nseed = 3\nbf16 = false\n", "other.toml")
    found = recipes.expanded(["--lr", "5", "--recipe", mine, other, "--seed", "4"])
    assert found[0] == "--expanded-recipe"
    assert re.fullmatch(re.escape(mine) + r"@[0-9a-f]{12}", found[1])
    assert found[-4:] == ["--lr", "5", "--seed", "4"]
    args = read(found)
    assert (args.lr, args.seed, args.swiglu, args.bf16) == (5.0, 4, False, False)
    assert (args.num_layers, args.recompute_modules) == (10, ["mlp", "moe"])
    # What has been expanded is left as it is.
    assert recipes.expanded(found) == found
    assert recipes.expanded(["--lr", "5"]) == ["--lr", "5"]
    assert recipes.expanded([f"--recipe={other}"])[2:] == ["--lr", "0.002", "--seed", "3"]


@pytest.mark.parametrize(
    ("flags", "kept", "dropped"),
    [
        (["--swiglu"], "swiglu", "squared_relu"),
        (["--lr-warmup-iters=7"], "lr_warmup_iters", "lr_warmup_fraction"),
        (["--lr-wsd-decay-iters", "9"], "lr_wsd_decay_iters", "lr_wsd_decay_fraction"),
        (["--train-samples", "99"], "train_samples", "train_iters"),
        (["--train-data-path", "x"], "train_data_path", "split"),
    ],
)
def test_of_flags_that_exclude_each_other_the_last_one_stays(flags, kept, dropped):
    args = read(recipes.expanded([*flags, "--recipe", "p0-2b"]))
    assert getattr(args, kept)
    assert not getattr(args, dropped)


def test_a_switch_of_a_file_is_dropped_on_the_command_line(tmp_path):
    """Also where Megatron has no opposite of it."""
    mine = write(tmp_path, "swiglu = true\nbf16 = true\n")
    assert read(recipes.expanded([f"--recipe={mine}"])).bf16
    args = read(recipes.expanded(["--recipe", mine, "p2-60m", "--bf16=false"]))
    assert (args.swiglu, args.bf16) == (True, False)
    # Where no file has set it, it is no flag.
    assert recipes.expanded(["--recipe", mine, "--fp16=false"])[-1] == "--fp16=false"


def test_a_run_is_its_configuration(tmp_path, monkeypatch, capsys):
    """RUN/config.toml, as a rank writes it, gives the flags of the run again."""
    flags = ["--lr", "1e-4", "--swiglu", "--data-path", "1", "a b", "--split", "9,1,0"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--run-dir", "r", "--resume=auto", *flags])
    args = Namespace(world_size=1, seed=1, load=None, pretrained_checkpoint=None)
    run_dir._write_config(tmp_path, args, {}, None)
    line = recipes.expanded(["--recipe", str(tmp_path), "--lr", "1"])
    assert line == ["--expanded-recipe", line[1], *flags, "--lr", "1"]
    assert megasink(["recipes", str(tmp_path)]) == 0
    mine = write(tmp_path, capsys.readouterr().out)
    assert flag_words(recipes.read(mine, known_flags()).flags) == flags
    (tmp_path / "config.toml").write_text("num-layer = 2\n")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/config.toml: num-layer is no")):
        recipes.read(str(tmp_path), known_flags())


def test_an_include_is_found_beside_its_file(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path, "lr = 1.0\nseed = 1\n", "base.toml")
    middle = write(tmp_path / "deep", 'include = "../base.toml"\nseed = 2\n')
    assert recipes.read(middle).flags == {"lr": 1.0, "seed": 2}


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        (
            "num-layer = 2\nnum_heads = 1\nrun-dir = 'x'\n--lr = 1\n",
            (
                "num-layer is not a flag of megasink train: did you mean num-layers?",
                "num_heads is not a flag of megasink train",
                "run-dir: give this flag on the command line instead",
                "--lr: write lr, without dashes",
            ),
        ),
        ("plugin = 'x'\n", ("plugin: give this flag on the command line",)),
        ("includes = 'x'\n", ("includes is not a flag of megasink train: did you mean include?",)),
        ("num_layers = 2\n", ("did you mean num-layers?",)),
        ("[flags]\nlr = 1\n", ("flags is a table: use top-level flags",)),
        ("lr = []\nseed = [true]\n", ("lr is []: give a list", "seed is [True]: give a list")),
        (
            "swiglu = 1\nlr = true\nseed = 3\nno-persist-layer-norm = 'x'\n",
            (
                "swiglu is 1, but this flag is a switch: give true or false",
                "lr is true, but this flag needs a value",
                "no-persist-layer-norm is 'x', but this flag is a switch",
            ),
        ),
        ("include = 3\nabout = 4\n", ("include is 3: give one name or path", "about is 4: give a")),
        ("include = 'mine.toml'\n", ("include 'mine.toml' is circular",)),
    ],
)
def test_every_problem_is_told_at_once(text, phrases, tmp_path):
    with pytest.raises(ConfigError) as error:
        recipes.read(write(tmp_path, text), known_flags())
    assert len(error.value.problems) == len(phrases)
    for phrase, problem in zip(phrases, error.value.problems, strict=True):
        assert phrase in problem
        assert problem.startswith(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (["--recipe", "p0-06b"], "the recipe 'p0-06b' is unknown: choose p0-0.6b"),
        (["--recipe", "no/such.toml"], "the recipe no/such.toml does not exist"),
        (["--recipe", "p0-2b", "--recipe", "p0-1b"], "--recipe is given twice"),
        (["--recipe", "--lr", "1"], "--recipe needs a value"),
        (["--recipe=", "--lr", "1"], "--recipe needs a value"),
        (["--recipe", "/"], "/ is not a run: it has no config.toml"),
    ],
)
def test_a_recipe_that_is_not_there_is_told_by_name(flags, phrase):
    with pytest.raises(UserError, match=re.escape(phrase)):
        recipes.expanded(flags)


def test_what_starts_no_run_refuses_a_recipe():
    """An unexpanded one would be dropped in silence."""
    problems = "\n".join(all_checks.of_line(read([*MOCK, "--recipe", "p0-2b"]))[0])
    assert "--recipe works only in megasink train" in problems


def test_a_plan_takes_a_file(tmp_path):
    mine = write(tmp_path, "num-layers = 7\n")
    args, flags = plan_launch.read_line(["--ranks", "8", "--recipe", mine, "--lr", "1"])
    assert (args.ranks, read(flags).num_layers) == (8, 7)


def test_the_launcher_passes_flags_on_and_resume_repeats_them(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda *given: started.append(given) or 0)
    monkeypatch.setattr(preflight, "check", lambda lines: [read(line.flags) for line in lines])
    line = ["--run-dir", str(tmp_path / "run"), "--device", "cpu", *MOCK, "--recipe", "p2-60m"]
    assert launch.main(line) == 0
    ((flags, _, _, steps),) = started
    assert flags == [word for word in recipes.expanded(line) if word not in line[:2]]
    assert (steps, flags[0], "--recipe" in flags) == (20000, "--expanded-recipe", False)
    # As a rank records it; the recipe may be another one by now.
    run = tmp_path / "recorded"
    run.mkdir()
    (run / "starts.jsonl").write_text(json.dumps({"command": ["x.py", *flags]}) + "\n")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')
    assert launch.flags_of_last_start(run) == flags
    assert launch.flags_of_last_start(run, recipes.expanded(line[2:])) == []


def test_recipes_are_listed_and_shown(capsys):
    assert megasink(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == recipes.shipped()
    assert megasink(["recipes", "p1-1.7b-28l-3.5t"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown.pop("about").startswith("P1, Table 2")
    assert shown == recipes.read("p1-1.7b-28l-3.5t").flags
    assert (shown["num-layers"], shown["lr"]) == (28, 4.5e-3)


def test_a_file_is_written_as_it_is_read():
    flags = {"a b": 'x"\\\n\x7fé', "c": [1, 2.5, "d"], "e": True, "f": 1e-10, "g": False}
    assert tomllib.loads("\n".join(toml_lines(flags))) == flags
