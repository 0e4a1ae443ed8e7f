"""`megasink evaluate`: what it writes, the tasks that ship, the papers' suites, bad input."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from megasink.analysis.evaluate import suites
from megasink.analysis.evaluate import tasks_loading as task_loading
from megasink.analysis.evaluate.harness import TaskResults
from megasink.analysis.evaluate.tasks_loading import OWN_TASKS, load_tasks
from megasink.cli import evaluate, main
from megasink.errors import ConfigError, UserError
from megasink.files.checked_fields import from_json
from tests.analysis.capture.tiny_models import save_with_tokenizer
from tests.analysis.interventions.harness_tasks import CHOICES, write_tasks
from tests.test_packaging import project

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

OWN = ("docstrings_choice", "docstrings_perplexity")


def items(name):
    return json.loads((OWN_TASKS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluate")
    texts = [item["text"] for item in items("docstrings_perplexity")[:20]]
    save_with_tokenizer(root, "llama", texts, max_position_embeddings=256)
    write_tasks(root / "tasks")
    heads = [{"kind": "zero-heads", "heads": [[0, 1], [1, 2]]}]
    (root / "heads.json").write_text(json.dumps(heads))
    return root


def run(root, *flags):
    command = ["evaluate", f"{root}/llama", "--output", f"{root}/out", "--device", "cpu"]
    return main([*command, *map(str, flags)])


def written(root):
    content = json.loads((root / "out/evaluation.json").read_text())
    keys = ("format", "model", "batch_size", "averages")
    about = {key: content.pop(key) for key in keys}
    assert about["format"] == 1
    assert {"name", "kind", "attention", "dtype"} <= about["model"].keys()
    return from_json(TaskResults, content, "it")


def test_an_evaluation_is_whole(root, capsys):
    assert run(root, "--tasks", *OWN, "--limit", 12, "--samples") == 0
    plain, said = written(root), capsys.readouterr().out
    assert set(plain.tasks) == set(OWN)
    assert "docstrings_choice" in said
    assert "Only the first 12 documents of each task" in said
    choice, text = (plain.tasks[name] for name in OWN)
    assert (choice.documents, choice.shots, choice.version) == (12, 0, "1.0")
    assert choice.metrics["acc"].standard_error > 0
    assert 0 < text.metrics["bits_per_byte"].value < 20
    lines = (root / "out/samples/docstrings_choice.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["doc"] for entry in entries] == items("docstrings_choice")[:12]
    right = [entry["acc"] for entry in entries]
    assert sum(right) / 12 == choice.metrics["acc"].value

    flags = ("--interventions", root / "heads.json", "--task-folder", root / "tasks")
    other = ("--tasks", OWN[1], "text", "--limit", 12, *flags, "--batch-size", 2)
    before = (root / "out/evaluation.json").read_bytes()
    assert run(root, *other) == 2
    assert "has results of other settings (--batch-size auto -> 2; " in capsys.readouterr().err
    assert (root / "out/evaluation.json").read_bytes() == before
    assert run(root, *other, "--overwrite") == 0
    zeroed = written(root)
    assert not (root / "out/samples").exists(), "of the evaluation before"
    (entry,) = zeroed.interventions
    assert (entry["kind"], entry["heads"]) == ("zero-heads", [[0, 1], [1, 2]])
    assert zeroed.tasks[OWN[1]].metrics != text.metrics
    assert zeroed.tasks["text"].documents == 3


def test_tokens_that_the_model_does_not_have_are_named(root, tmp_path, capsys):
    state = json.loads((root / "llama" / "tokenizer.json").read_text())
    state["model"]["vocab"]["e"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    shutil.copy(root / "llama" / "tokenizer_config.json", tmp_path)
    out = ("--output", tmp_path / "out", "--tokenizer", tmp_path)
    assert run(root, "--tasks", *OWN, "--limit", 5, *out) == 2
    assert "gives token id 900, but the model's vocabulary has" in capsys.readouterr().err
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_the_tasks_that_ship():
    choices, texts = items("docstrings_choice"), items("docstrings_perplexity")
    assert (len(choices), len(texts)) == (300, 60)
    assert all(len(set(item["choices"])) == 4 for item in choices)
    answers = [item["answer"] for item in choices]
    assert all(50 < answers.count(i) < 100 for i in range(4)), "no position is the answer"
    # Length alone finds few answers: chance is 75.
    longest = [max(range(4), key=lambda i: len(item["choices"][i])) for item in choices]
    assert sum(a == b for a, b in zip(answers, longest, strict=True)) < 110
    assert all(300 <= len(item["text"]) <= 1500 for item in texts)
    for package, patterns in project()["tool"]["setuptools"]["package-data"].items():
        folder = OWN_TASKS.parents[3].joinpath(*package.split("."))
        assert all(any(folder.glob(pattern)) for pattern in patterns), package


def test_every_task_of_the_suites_is_in_lm_evals_registry():
    for suite in suites.ALL:
        names = [part.task for part in suite.parts]
        index = task_loading._index(names, (), {})
        assert all(index.task_index[name].name == name for name in names)
        for part in suite.parts:
            leaves = list(task_loading._leaves(index, part.task))
            assert leaves, part.task
            assert all((entry.cfg or {}).get("metric_list") for entry in leaves)
    mmlu = task_loading._index(["mmlu"], (), {})
    assert len(list(task_loading._leaves(mmlu, "mmlu"))) == 57


def test_the_docs_have_the_suites():
    docs = "".join(path.read_text() for path in (Path(__file__).parents[3] / "docs").glob("*.md"))
    for suite in suites.ALL:
        tasks = ", ".join(f"`{part.task}` ({part.metric})" for part in suite.parts)
        shots = {part.shots for part in suite.parts}
        known = "the tasks' own" if shots == {None} else ", ".join(map(str, sorted(shots)))
        assert f"| {suite.row} `{suite.name}` | {tasks} | {known} | {suite.notes} |" in docs
    row = ", ".join(suite.row for suite in suites.ALL)
    assert f"| {row} | benchmark suites" in docs


def test_averages_are_those_of_the_papers():
    scores = {
        (part.task, part.metric): i / 10 for i, part in enumerate(suites.SUITES["P0.24"].parts)
    }
    found = suites.averages(["reasoning", "P0.24", "boolq", "P3.14"], scores)
    assert list(found) == ["P0.24"]
    # Both parts of ARC are one benchmark.
    assert found["P0.24"].benchmarks["ARC"] == pytest.approx(0.05)
    values = [0.05, *(i / 10 for i in range(2, len(scores)))]
    assert found["P0.24"].value == pytest.approx(sum(values) / len(values))
    assert len(values) == found["P0.24"].paper == 6
    del scores["gsm8k", "exact_match,strict-match"]
    assert suites.averages(["P0.24"], scores) == {}
    for row, count in (("P0.19", 10), ("P0.25", 6), ("P0.29", 9)):
        suite = suites.SUITES[row]
        names = {part.benchmark or part.task for part in suite.parts}
        assert len(names) == suite.averaged == count


def test_processbench_asks_for_the_first_error(tmp_path):
    """Loaded from a file in the place of its repository: the question, the answer, the F1."""
    docs = [
        {"problem": "1 + 1?", "steps": ["one", "two"], "label": 1},
        {"problem": "2 + 2?", "steps": ["four"], "label": -1},
        {"problem": "3 + 3?", "steps": ["five"], "label": 0},
    ]
    lines = tmp_path / "docs.jsonl"
    lines.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    text = (OWN_TASKS / "processbench_gsm8k.yaml").read_text()
    text = text.replace("task: processbench_gsm8k", "task: critiques")
    text = text.replace("Qwen/ProcessBench", "json").replace(
        "test_split: gsm8k", "test_split: test"
    )
    (tmp_path / "critiques.yaml").write_text(
        f"{text}dataset_kwargs:\n  data_files:\n    test: {lines}\n"
    )
    task = load_tasks(["critiques"], folders=[tmp_path]).loaded["tasks"]["critiques"]
    questions = [task.doc_to_text(doc) for doc in task.test_docs()]
    assert "<paragraph_1>\ntwo\n</paragraph_1>" in questions[0]
    assert questions[1].endswith("or -1 if there is none. Put it in \\boxed{}.")
    answers = ["It is \\boxed{0}, no: \\boxed{1}", "\\boxed{-1}", "no box"]
    scores = [
        task.process_results(doc, [answer])["critique_f1"]
        for doc, answer in zip(task.test_docs(), answers, strict=True)
    ]
    assert scores == [(True, True), (False, True), (True, False)]
    f1 = task.aggregation()["critique_f1"]
    assert f1(scores) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert f1(scores[:1]) == 1.0
    assert f1([(True, True), (False, False)]) == 0.0


def test_a_suite_is_its_tasks_with_its_shots():
    found = suites.expanded(["P3.17", "piqa-winogrande", "boolq"])
    assert [(entry.task, entry.shots) for entry in found] == [
        ("piqa", 0),
        ("winogrande", 5),
        ("boolq", None),
    ]
    lengths = suites.expanded(["P1.38"])[0].metadata["max_seq_lengths"]
    assert (lengths[0], lengths[-1]) == (4096, 131072)


def test_shots(root):
    tasks = load_tasks(["choice", OWN[0]], folders=[root / "tasks"], num_fewshot=2).loaded["tasks"]
    assert tasks["choice"].get_config("num_fewshot") == 2
    assert tasks[OWN[0]].get_config("num_fewshot") == 0, "fixed by the task"


@pytest.mark.parametrize(
    ("flags", "phrases"),
    [
        (["--tasks", "docstring_choice", "piqua"], ["2 problems", "docstrings_choice?", "piqa"]),
        (["--tasks", "hellaswag"], ["hellaswag is not on this", "--allow-download", "HF_HOME"]),
        (["--tasks", "P0.19"], ["humaneval", "--confirm-run-unsafe-code"]),
        (["--tasks", OWN[0], OWN[0], "choice", "choices"], ["choices: no such task"]),
        (["--tasks", OWN[0], "--batch-size", "0"], ["--batch-size 0"]),
        (["--tasks", OWN[0], "--batch-size", "all"], ["--batch-size: 'all' is neither"]),
        (["--tasks", OWN[0], "--interventions", "{0}/none.json"], ["{0}/none.json: no such file"]),
        (["--tasks", OWN[0], "--task-folder", "{0}/none"], ["{0}/none is not a folder"]),
        (["--tasks", "broken", "--task-folder", "{0}/broken"], ["task broken cannot be loaded"]),
        (["--tasks", "lacking", "--task-folder", "{0}/broken"], ["megasink[eval-long]"]),
    ],
)  # fmt: skip
def test_bad_input_is_answered_before_the_model_loads(root, flags, phrases, capsys, monkeypatch):
    opened = "megasink.transformers.load_hf_folder.load"
    monkeypatch.setattr(opened, lambda *_, **__: pytest.fail("the model is loaded"))
    (root / "broken").mkdir(exist_ok=True)
    broken = "task: broken\ncustom_dataset: !function items.nothing\ntest_split: test\n"
    (root / "broken" / "broken.yaml").write_text(broken)
    lacking = broken.replace("broken", "lacking").replace("items", "others")
    (root / "broken" / "lacking.yaml").write_text(lacking)
    (root / "broken" / "items.py").write_text("def nothing(**_): raise ValueError('no data')")
    (root / "broken" / "others.py").write_text("import no_such_package_at_all")
    (root / "out").mkdir(exist_ok=True)
    before = sorted(root.rglob("*"))
    capsys.readouterr()
    lookup = socket.getaddrinfo
    given = [flag.replace("{0}", str(root)) for flag in flags]
    assert run(root, *given, "--output", root / "new") == 2
    said = capsys.readouterr().err
    assert said.startswith("megasink: error: ")
    for phrase in phrases:
        assert phrase.replace("{0}", str(root)) in said
    assert [p for p in sorted(root.rglob("*")) if "__pycache__" not in p.parts] == [
        p for p in before if "__pycache__" not in p.parts
    ]
    assert socket.getaddrinfo is lookup


def test_tasks_that_fetch_in_their_own_code_are_offline_too(tmp_path):
    (tmp_path / "fetching.yaml").write_text(
        "task: fetching\ncustom_dataset: !function items.fetch\ntest_split: test\n"
    )
    (tmp_path / "items.py").write_text(
        "import urllib.request\n"
        "def fetch(**_): return urllib.request.urlopen('https://example.com/data.json')\n"
    )
    with pytest.raises(UserError, match="fetching is not on this machine"):
        load_tasks(["fetching"], folders=[tmp_path])


def test_tokenizers_with_code_make_no_texts(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "x.X"}}')
    with pytest.raises(UserError, match="refers to custom code"):
        load_tasks(["niah_single_1"], tokenizer=tmp_path)


def test_without_lm_eval(monkeypatch):
    monkeypatch.setattr(task_loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'megasink\[eval\]'"):
        load_tasks([OWN[0]])


def test_one_process(root, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = evaluate._parser(None).parse_args(
        [f"{root}/llama", "--output", f"{root}/out", "--tasks", OWN[0], "--device", "cpu"]
    )
    with pytest.raises(ConfigError, match="in one process"):
        evaluate._check(args, is_run=False)


def test_the_same_task_twice(root):
    both = "group: both\ntask:\n  - choice\n  - text\n"
    (root / "tasks" / "both.yaml").write_text(both)
    with pytest.raises(UserError, match="includes choice twice"):
        load_tasks(["choice", "both"], folders=[root / "tasks"])
    loaded = load_tasks(["both"], folders=[root / "tasks"]).loaded
    assert set(loaded["tasks"]) == {"choice", "text"}
    assert len(loaded["tasks"]["choice"].test_docs()) == len(CHOICES)


def test_data_that_a_tasks_own_code_reads_is_asked_for_first(tmp_path, monkeypatch):
    """RULER makes texts of 131,072 tokens for minutes before it opens its essays."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match=r"data of task ruler .*no baber/paul_graham_essays in the"):
        load_tasks(["P1.38"])
    (tmp_path / "hub" / "datasets--baber--paul_graham_essays").mkdir(parents=True)
    with pytest.raises(UserError) as error:  # the next in the way: a package, or the tokenizer
        load_tasks(["P1.38"])
    assert "paul_graham_essays" not in str(error.value)
