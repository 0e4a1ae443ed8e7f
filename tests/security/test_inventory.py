"""Every place that reads objects, runs code or starts a process, with the reason why it is safe.

A new one fails until it is entered here, and an entry without its place fails too.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("megasink", "tools", "examples", "docker")
# Modules and functions by the end of their dotted name; any use counts, called or handed on.
WATCHED = {
    *("torch.load", "numpy.load"),
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"),
    *("eval", "exec", "compile", "__import__", "import_module", "spec_from_file_location"),
    *("runpy", "code.interact", "yaml", "subprocess", "os.system", "os.popen", "pty", "posix"),
    *("create_subprocess_exec", "create_subprocess_shell", "shell=True"),
    *("trust_remote_code", "from_pretrained", "snapshot_download", "hf_hub_download"),
    *("allow_pickle", "weights_only", "extractall", "load_state_dict_from_url", "urlopen"),
    *("requests", "urllib.request", "huggingface_hub", "torch.hub", "load_dataset"),
}
FIXED = "a fixed program with a list of arguments, no shell"
OWN_NAMES = "imports modules of this package, whose names stand in the code"
LOCAL = "a folder of this machine, without its code: local_files_only, trust_remote_code=False"
OWN = "this Python with our own commands, no shell"
ARRAYS = "arrays alone: allow_pickle is False"
RESTRICTED = "makes only what its allow-list names"
SAFE = {
    ("examples/notebooks/letters.py", "from_pretrained"): "the folder that it has just written",
    ("megasink/__init__.py", "import_module"): OWN_NAMES,
    ("megasink/attention/__init__.py", "import_module"): OWN_NAMES,
    ("megasink/attention/custom_op.py", "import_module"): OWN_NAMES,
    ("megasink/attention/kernels/__init__.py", "import_module"): OWN_NAMES,
    ("megasink/attention/kernels/cuda.py", "import_module"): "kernels that the code names",
    ("megasink/checkpoints/megatron_lm_arguments.py", "yaml"): "safe_load of run_config.yaml",
    ("megasink/plan/launch_script.py", "yaml"): "a SafeLoader, of --script FILE.yaml",
    ("megasink/checkpoints/stored_tensor.py", "torch.load"): "weights_only, and on no device",
    ("megasink/checkpoints/stored_tensor.py", "weights_only"): "True",
    ("megasink/checkpoints/torch_metadata.py", "pickle"): RESTRICTED,
    (
        "megasink/checkpoints/code_free_loading.py",
        "pickle",
    ): "its errors and dumps; loads is Megatron's SafeUnpickler",
    ("megasink/checkpoints/code_free_loading.py", "torch.load"): "makes every other one safe",
    ("megasink/checkpoints/code_free_loading.py", "weights_only"): "set to True",
    ("megasink/convert/verify_logits.py", "from_pretrained"): LOCAL,
    ("megasink/convert/verify_logits.py", "trust_remote_code"): "False",
    ("megasink/data/hf_tokenizer.py", "from_pretrained"): LOCAL,
    ("megasink/data/hf_tokenizer.py", "trust_remote_code"): "False",
    ("megasink/cpu/broken_packages.py", "import_module"): "packages that the code names",
    ("megasink/megatron/__init__.py", "import_module"): OWN_NAMES,
    ("megasink/training/checks/device_options.py", "import_module"): "TransformerEngine alone",
    ("megasink/cli/__init__.py", "import_module"): OWN_NAMES,
    (
        "megasink/cli/doctor_attention.py",
        "import_module",
    ): "the class that --attention MODULE:CLASS names",
    ("megasink/cli/demo_runs.py", "subprocess"): FIXED,
    ("megasink/analysis/metrics/registry.py", "import_module"): OWN_NAMES,
    ("megasink/convert/targets/__init__.py", "import_module"): OWN_NAMES,
    (
        "megasink/plan/hollow/compile_libraries.py",
        "subprocess",
    ): "the C++ compiler, no shell",
    ("examples/replicate/grid/preload.py", "import_module"): OWN_NAMES,
    ("examples/real_models/run.py", "import_module"): OWN_NAMES,
    (
        "examples/replicate/grid/start.py",
        "subprocess",
    ): "this Python with our own commands, no shell; flags of the user's file",
    ("megasink/analysis/evaluate/tasks_loading.py", "huggingface_hub"): "its cache; set offline",
    ("megasink/cli/hub.py", "huggingface_hub"): "asked for by --allow-download or --push alone",
    ("megasink/cli/hub.py", "snapshot_download"): "for --allow-download: safetensors, JSON and "
    "text by name; no pickles, no code",
    ("megasink/finetune/finetune_job.py", "huggingface_hub"): "front matter of cards, by safe YAML",
    (
        "megasink/cli/doctor_self_test.py",
        "subprocess",
    ): "this Python with our own module, no shell",
    (
        "megasink/plan/run_plan.py",
        "subprocess",
    ): "this Python with our own module, no shell; flags of the command line, through a pipe",
    ("megasink/plugins.py", "import_module"): "modules that the command line names, and those of "
    "packages that somebody installed; never a name that stands in a file",
    ("megasink/transformers/load_hf_folder.py", "from_pretrained"): LOCAL,
    ("megasink/transformers/load_hf_folder.py", "trust_remote_code"): "False",
    ("megasink/analysis/result_store.py", "allow_pickle"): ARRAYS,
    ("megasink/analysis/result_store.py", "numpy.load"): ARRAYS,
    ("megasink/training/checked_dataset.py", "allow_pickle"): ARRAYS,
    ("megasink/training/checked_dataset.py", "numpy.load"): ARRAYS,
    ("examples/steps.py", "subprocess"): OWN,
    ("megasink/finetune/export_finetuned.py", "from_pretrained"): LOCAL,
    ("megasink/finetune/export_finetuned.py", "trust_remote_code"): "False",
    ("megasink/finetune/sft_training.py", "from_pretrained"): "an adapter that it wrote",
    ("megasink/training/preflight.py", "subprocess"): FIXED,
    ("megasink/training/launch.py", "subprocess"): FIXED,
    (
        "megasink/training/torchrun_processes.py",
        "subprocess",
    ): "this Python with torchrun, no shell; flags of a last start: training/resume_flags.py",
    ("examples/real_models/analyses.py", "allow_pickle"): ARRAYS,
    ("examples/real_models/analyses.py", "numpy.load"): ARRAYS,
    ("examples/real_models/changes.py", "allow_pickle"): ARRAYS,
    ("examples/real_models/changes.py", "numpy.load"): ARRAYS,
    (
        "examples/real_models/fidelity.py",
        "from_pretrained",
    ): "folders of the command line, and what convert-to-hf wrote; no code of them",
    (
        "examples/real_models/fidelity.py",
        "subprocess",
    ): "this Python with our own commands, no shell",
    ("examples/real_models/fetch.py", "from_pretrained"): "a GGUF file of a known sha256",
    ("examples/real_models/wheels.py", "subprocess"): "pip download of sources.toml's packages, "
    "binary and without dependencies; this Python, no shell",
    ("tools/site.py", "subprocess"): "the generator of this environment, no shell",
    ("tools/site.py", "yaml"): "safe_load of mkdocs.yml",
    ("examples/replicate/corpora.py", "subprocess"): "apt-get by its path, with package names of "
    "text_sources.toml, no shell",
    ("megasink/training/run_dir.py", "subprocess"): "git in this package's own folder, no shell",
}
"""{(file, what): why it is safe}."""


def places(text: str) -> Counter[str]:
    """What of `WATCHED` a module uses, and how often."""
    found: Counter[str] = Counter()
    imported: dict[str, str] = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.asname or alias.name): alias.name for alias in node.names}
            found.update(_watched(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            imported |= full
            found.update(map(_watched, full.values()))
        elif isinstance(node, ast.keyword):
            name = node.arg or ""
            if name == "shell" and getattr(node.value, "value", True):
                name = "shell=True"
            found[_watched(name)] += 1
        elif isinstance(node, ast.Dict):
            keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
            found.update(_watched(key) for key in keys if isinstance(key, str))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            name = f"{imported.get(first, first)}{'.' * bool(rest)}{rest}"
            # A method of that name, as model.eval(), is none.
            if isinstance(node, ast.Attribute) and node.attr in ("eval", "compile", "exec"):
                continue
            found[_watched(name)] += 1
    del found[""]
    return found


def _watched(name: str) -> str:
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            if (part := ".".join(parts[start:end])) in WATCHED:
                return part
    return ""


def test_every_place_is_entered_with_its_reason():
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    files = [path for path in files if "tests" not in path.relative_to(ROOT).parts]
    found = {
        (str(path.relative_to(ROOT)), what)
        for path in [*files, ROOT / "setup.py"]
        for what in places(path.read_text())
    }
    assert len(files) > 200
    assert (sorted(found - SAFE.keys()), sorted(SAFE.keys() - found)) == ([], [])
    assert all(SAFE.values())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load as read\nread('x')", "torch.load"),
        ("import numpy as np\nnp.load('x')", "numpy.load"),
        ("from pickle import loads", "pickle"),
        ("import os\nf = os.system", "os.system"),
        ("eval('1')", "eval"),
        ("def f(run=exec): pass", "exec"),
        ("import importlib\nimportlib.import_module(n)", "import_module"),
        ("AutoTokenizer.from_pretrained(x)", "from_pretrained"),
        ("options = {'trust_remote_code': True}", "trust_remote_code"),
        ("run(command, shell=True)", "shell=True"),
        ("import yaml\nyaml.load(f)", "yaml"),
        ("from transformers.utils import hub\nhub.hf_hub_download('x')", "hf_hub_download"),
        ("import subprocess as s\ns.run('x')", "subprocess"),
    ],
)
def test_each_of_them_is_found(line, what):
    assert what in places(line)


@pytest.mark.parametrize("line", ["model.eval()", "re.compile('x')", "run(shell=False)"])
def test_what_is_harmless_is_not(line):
    assert not places(line)
