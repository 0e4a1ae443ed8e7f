"""CONTRIBUTING.md is true: its modules and commands run as they are written, from outside."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.documented import CONTRIBUTING as PAGE
from tests.documented import MODULES, ROOT
from tests.forkserver import HANG_SECONDS, put_megasink_into
from tests.runs import steps

COMMANDS = dict(re.findall(r"^```bash (\w+)\n(.*?)^```$", PAGE, re.M | re.S))
# How many files of the package and its tests one of them may touch.
MOST_FILES = {"variant": 3, "metric": 2, "target": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the modules and the texts of the repository, away from it."""
    path = tmp_path_factory.mktemp("contributing")
    shutil.copy(ROOT / "README.md", path)
    shutil.copytree(ROOT / "docs", path / "docs")
    for name, text in MODULES.items():
        (path / name).write_text(text)
    (path / "bin").mkdir()
    put_megasink_into(path / "bin", "tests.analysis.capture.without_figures")
    return path


def run(script, folder):
    """Run lines of a shell, where megasink is a fork."""
    return subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_a_target_of_ones_own_makes_the_round_trip(folder):
    done = run(COMMANDS["target"], folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("target: GlmForCausalLM (glm): requested") == 2
    # Against Megatron, from both sides and once more.
    assert len(re.findall(r"verified on \d+ tokens of text, float32: logits", done.stdout)) == 3
    first, second = (folder / name / "model.safetensors" for name in ("exported", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.fixture(scope="module")
def variant(folder):
    """What the commands about a variant and a metric print."""
    done = run(COMMANDS["variant"], folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_a_variant_of_ones_own_trains_and_resumes(folder, variant):
    lines = steps(folder / "runs/grouped")
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert all(line["imbalance"] > 0 for line in lines)
    config = json.loads((folder / "runs/grouped/config.json").read_text())
    assert config["arguments"]["plugin"] == ["my_variant"]
    assert "my_variant (--plugin): variant sink-per-group" in variant
    assert "my_metric (--plugin): metric importance_gini" in variant


def test_analyses_and_reports_know_the_variant_and_the_metric(folder, variant):
    metrics = json.loads((folder / "runs/analysis/results.json").read_text())["metrics"]
    importance = torch.tensor(metrics["importance"]["values"])
    # The gate is what the slot leaves of a row.
    torch.testing.assert_close(importance, 1 - torch.tensor(metrics["slot_alpha"]["values"]))
    assert 0.5 < importance.min() < importance.max() < 1
    gini = metrics["importance_gini"]
    ordered, ranks = importance.sort(dim=1).values, torch.arange(1.0, 5.0)
    expected = (2 * ranks - 5) @ ordered.T / (4 * ordered.sum(1))
    torch.testing.assert_close(torch.tensor(gini["values"]), expected, rtol=1e-4, atol=1e-6)
    with (folder / "runs/trace/trace.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert float(rows[-1]["importance_gini"]) == pytest.approx(gini["number"], rel=1e-5)
    for page in ("analysis", "trace", "report"):
        assert "importance gini" in (folder / "runs" / page / "report.html").read_text()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train --run-dir runs/grouped --resume --train-iters 6", "--resume: --plugin my_variant "
         "of the last start in runs/grouped is not reused, for safety: pass it"),
        ("generate runs/grouped --prompt x", "the run was trained with --plugin my_variant"),
        ("convert-to-hf runs/grouped --output hf --plugin my_variant",
         "sink-per-group: its record has no export rule"),
    ],
)  # fmt: skip
def test_what_is_not_said_is_refused_by_name(folder, variant, command, said):
    done = run(f"megasink {command}", folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_its_plugin_a_target_is_unknown(folder):
    done = run("megasink convert-to-hf RUN --output OUT --target glm", folder)
    assert done.returncode == 2
    assert "--target 'glm' is unknown" in done.stderr
    assert "to use your own, add --plugin MODULE" in done.stderr


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []


def listed(what):
    """The files that the page says something of its kind touches in the package."""
    _, _, text = PAGE.partition(f"\nIn the package a {what} touches ")
    return re.findall(r"^- `([\w/]+\.py)`", text.partition("\n#")[0], re.M)


@pytest.mark.parametrize("what", MOST_FILES)
def test_in_the_package_it_touches_few_files_that_exist(what):
    files = listed(what)
    assert 0 < len(files) <= MOST_FILES[what]
    for file in files:
        assert (ROOT / file).is_file() or Path(file).stem == f"my_{what}", file


def test_the_same_code_works_inside_of_the_package(tmp_path):
    shutil.copytree(ROOT / "megasink", tmp_path / "megasink")
    program = """
from megasink.convert.targets import TARGETS
from megasink.analysis.metrics import metrics
from megasink.attention.variants import names
registered = {"variant": names(), "metric": metrics(), "target": TARGETS}
"""
    for what in MOST_FILES:
        code = MODULES[f"my_{what}.py"]
        first, second = (tmp_path / file for file in listed(what)[:2])
        if not first.exists():
            with second.open("a") as file:
                package = ".".join(second.parent.relative_to(tmp_path).parts)
                file.write(f"from {package} import {first.stem}\n")
        with first.open("a") as file:
            file.write(re.sub(r'\A""".*?"""', "", code, flags=re.S))
        (name,) = re.findall(r'^(?: *name=|    )"([\w-]+)",$', code, re.M)[:1]
        program += f"assert {name!r} in registered[{what!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
