"""The files that install megasink agree with each other.

Not covered: no image is built here, and no environment is installed; .ci/run installs one.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages
from transformers import modeling_utils

from megasink.cli.doctor import EXTRAS

ROOT = Path(__file__).parents[1]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
IMPORT_NAMES = {
    "megatron-core": "megatron",
    "scikit-learn": "sklearn",
    "pillow": "PIL",
}  # where they differ


@cache
def project() -> dict[str, Any]:
    """What pyproject.toml says of the package."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return table


def requirements(extra: str = "") -> list[str]:
    """What the package requires, or one of its extras beside that, without itself."""
    table = project()["project"]
    wanted = table["optional-dependencies"][extra] if extra else table["dependencies"]
    own = [text for text in wanted if text.startswith("megasink")]
    inner = [each for text in own for each in requirements(text[9:-1])]
    return [*inner, *(text for text in wanted if text not in own)]


def group(name: str) -> list[str]:
    """The requirements of a dependency group, with those that it includes."""
    found: list[str] = []
    for each in project()["dependency-groups"][name]:
        found += group(each["include-group"]) if isinstance(each, dict) else [each]
    return found


def pins(path: str) -> dict[str, Version]:
    """Versions of a constraints file; every line must be an exact one."""
    found: dict[str, Version] = {}
    for line in (ROOT / path).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{path} has {name} twice"
        found[name] = Version(specifier.version)
    return found


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_metadata():
    table = project()["project"]
    assert table["name"] == "megasink"
    assert set(table["optional-dependencies"]) == set(EXTRAS)
    pythons = SpecifierSet(table["requires-python"])
    assert [v for v in ("3.11", "3.12", "3.13", "3.14") if v in pythons] == ["3.12", "3.13"]
    assert (ROOT / ".python-version").read_text().strip() in pythons
    found = find_packages(str(ROOT), **project()["tool"]["setuptools"]["packages"]["find"])
    assert {"megasink", "megasink.balance"} <= set(found)
    assert not any(name.startswith("tests") for name in found)


def test_package_citation_and_changelog_have_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    releases = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert project()["project"]["version"] == releases[0] == cited["version"]
    titles = {reference["title"] for reference in cited["references"]}
    papers = (ROOT / "docs/papers.md").read_text().split("| row |")[0]
    assert all(title in " ".join(papers.split()) for title in titles)
    assert len(titles) == papers.count("- **P")


def test_issue_forms_can_be_read():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= part.keys() for part in form["body"])


def test_what_trains_brings_the_train_weight_along():
    train = set(requirements("train"))
    assert train
    assert not train & set(requirements())
    for extra in ("gpu", "muon"):
        assert train <= set(requirements(extra))


def test_the_extra_of_gguf_has_the_packages_that_transformers_asks_for():
    source = Path(modeling_utils.__file__).read_text()
    asked = set(re.findall(r"(\w+) is required when loading a GGUF", source))
    assert asked
    assert asked <= set(requirements("gguf"))


def test_entry_point_exists():
    ((name, target),) = project()["project"]["scripts"].items()
    module, function = target.split(":")
    assert name == "megasink"
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    definitions = [n.name for n in ast.parse(path.read_text()).body if hasattr(n, "name")]
    assert function in definitions


@pytest.mark.parametrize(
    ("extra", "files"),
    [
        ("", ["constraints.txt"]),
        ("train", ["constraints.txt"]),
        ("eval", ["constraints.txt"]),
        ("finetune", ["constraints.txt"]),
        ("muon", ["constraints.txt"]),
        ("gguf", ["constraints.txt"]),
        ("storage", ["constraints.txt"]),
        ("gpu", ["constraints.txt", "docker/constraints-gpu.txt"]),
    ],
)
def test_constraints_cover(extra: str, files: list[str]):
    wanted = requirements(extra)
    if files == ["constraints.txt"]:
        wanted += group("dev")
    pinned = {name: v for path in files for name, v in pins(path).items()}
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {files}"
        # As pip does it: a pre-release counts only where the bound itself names one.
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


@pytest.mark.network
@pytest.mark.skipif(
    "MEGASINK_TEST_NETWORK" not in os.environ,
    reason="downloads 4 GB in five minutes: set MEGASINK_TEST_NETWORK=1",
)
@pytest.mark.parametrize("extra", ["eval,finetune,gguf,muon,storage", "gpu"])
def test_pip_resolves_the_constraints(extra: str, tmp_path: Path):
    """Everything that pip would install has one version: pinned here, or by torch's own pins."""
    files = ["constraints.txt", *(["docker/constraints-gpu.txt"] if extra == "gpu" else [])]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--no-build-isolation", f"--report={tmp_path / 'report.json'}"]
    subprocess.run(
        [*command, *(f"--constraint={name}" for name in files), f".[{extra}]"], cwd=ROOT, check=True
    )
    chosen = json.loads((tmp_path / "report.json").read_text())["install"]
    names = {canonicalize_name(package["metadata"]["name"]) for package in chosen} - {"megasink"}
    assert len(names) > 50
    pinned = {name for path in files for name in pins(path)}
    assert {name for name in names - pinned if not name.startswith("nvidia-")} == set()


def test_two_constraint_files_do_not_contradict():
    assert not set(pins("constraints.txt")) & set(pins("docker/constraints-gpu.txt"))


def test_every_requirement_is_used_or_justified():
    imported: set[str] = set()
    for path in (ROOT / "megasink").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    source = (ROOT / "pyproject.toml").read_text()
    for requirement in map(Requirement, requirements() + requirements("train")):
        module = IMPORT_NAMES.get(requirement.name, requirement.name.replace("-", "_"))
        justified = re.search(rf'"{re.escape(requirement.name)}\b[^"]*",\s*#', source)
        assert module in imported or justified, f"{requirement.name}: not imported, no comment"


def instructions(name: str) -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction of a Dockerfile, continuation lines joined."""
    lines = (ROOT / "docker" / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = text.replace("\\\n", " ").splitlines()
    return [(k, rest) for k, _, rest in (line.partition(" ") for line in joined if line.strip())]


def copied(name: str) -> list[str]:
    sources: list[str] = []
    for keyword, rest in instructions(name):
        if keyword == "COPY" and "--from=" not in rest:
            sources += [word for word in rest.split()[:-1] if not word.startswith("--")]
    return sources


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_copies_what_exists(name: str):
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    assert copied(name)
    for path in copied(name):
        assert (ROOT / path).exists(), f"{name} copies {path}"
        assert any(path == a or path.startswith(f"{a}/") for a in allowed), f"{path} is ignored"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_pins_its_base_and_drops_root(name: str):
    rows = instructions(name)
    stages: set[str] = set()
    for keyword, rest in rows:
        if keyword == "FROM":
            image, *alias = rest.split()
            assert image in stages or re.search(r":.*\d", image), f"{image} has no version"
            stages |= set(alias[1:])
    user = [rest for keyword, rest in rows if keyword == "USER"][-1]
    assert user.isdigit(), "a name cannot be checked by Kubernetes' runAsNonRoot"
    assert int(user) > 0
    assert [rest for keyword, rest in rows if keyword == "ENTRYPOINT"] == ['["entrypoint.sh"]']


def test_base_image_has_the_cuda_version_of_torch():
    if torch.version.cuda is None or Version(torch.__version__).base_version != str(
        pins("constraints.txt")["torch"]
    ):
        pytest.skip("this torch is not the one of constraints.txt with CUDA")
    (cuda,) = [rest.removeprefix("CUDA=") for k, rest in instructions("Dockerfile") if k == "ARG"][
        :1
    ]
    assert ".".join(cuda.split(".")[:2]) == torch.version.cuda


ENTRYPOINT = ROOT / "docker/entrypoint.sh"


def enter(tmp_path: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point where megasink and torchrun only print how they were called."""
    for name in ("megasink", "torchrun", "python"):
        stub = f"#!/bin/sh\nprintf '{name}'\nprintf ' <%s>' \"$@\"\nexit 3\n"
        executable(tmp_path / "bin" / name, stub)
    return subprocess.run(
        [str(ENTRYPOINT), *line],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.parametrize(
    "line",
    [
        ("megasink", "train", "--run-dir", "two words"),
        ("torchrun", "--nproc-per-node", "8", "examples/pretrain_gpt_sink.sh", ""),
        ("python", "-c", "print(1); $HOME"),
    ],
)
def test_entrypoint_hands_the_line_on_unchanged(tmp_path: Path, line: tuple[str, ...]):
    done = enter(tmp_path, *line)
    assert done.stdout == line[0] + "".join(f" <{word}>" for word in line[1:])
    assert done.returncode == 3, "the program's own exit status is the container's"


def test_entrypoint_without_a_line_shows_help(tmp_path: Path):
    assert enter(tmp_path).stdout == "megasink <--help>"


def test_entrypoint_refuses_what_is_no_program(tmp_path: Path):
    done = enter(tmp_path, "--run-dir", "x")
    assert done.returncode == 127
    assert "'--run-dir' is not a program" in done.stderr
    assert "megasink or torchrun" in done.stderr
    assert done.stdout == ""
