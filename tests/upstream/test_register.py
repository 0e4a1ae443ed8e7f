"""Every patch of upstream is declared, rests on lines that are there, and says so when they go.

Upstream's files are read as text here and never imported; that the replacements work is shown by
the test that each patch names.
"""

import ast
import functools
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megasink.cli import main as megasink
from megasink.cpu.all_patches import TABLE
from megasink.errors import UserError
from megasink.upstream import patch_register
from megasink.upstream.patch_register import Patch, Quote

ROOT = Path(__file__).resolve().parents[2]
QUOTES = [(p, q) for p in TABLE for q in p.quotes if q.is_installed() and p.is_needed]
NAMES = [f"{p.name}: {q.code}" for p, q in QUOTES]


@functools.cache
def upstream(where):
    return patch_register._read(where.partition(":")[0])


@pytest.fixture
def rewritten(monkeypatch):
    """Lets upstream's file of a quotation be another text."""

    def write(quote, text):
        name = upstream(quote.where)[0]
        monkeypatch.setattr(patch_register, "_read", lambda module: (name, text))

    return write


@pytest.mark.parametrize("patch", TABLE, ids=lambda p: p.name)
def test_a_patch_rests_on_lines_that_are_there(patch):
    installed = [quote for quote in patch.quotes if quote.is_installed() and patch.is_needed]
    assert len(patch.where()) == len(installed)
    assert patch.reason
    assert (ROOT / patch.test).is_file()
    for quote, place in zip(installed, patch.where(), strict=True):
        name, _, number = place.rpartition(":")
        line = upstream(quote.where)[1].splitlines()[int(number) - 1]
        word = re.search(r"\w{3,}", quote.code.removeprefix("def "))[0]
        assert word in line or line.strip().endswith(("(", "["))
        assert name.partition("/")[0] == quote.where.partition(".")[0]


@pytest.mark.parametrize(("patch", "quote"), QUOTES, ids=NAMES)
def test_a_changed_line_is_refused_in_one_line(patch, quote, rewritten):
    """Each identifier of the quotation is another one in upstream's next release."""
    name, text = upstream(quote.where)
    words = set(re.findall(r"[A-Za-z_]\w{3,}", quote.code)) - {"self", "True", "False"}
    changed = re.sub(rf"\b({'|'.join(words)})\b", r"\1_of_next_year", text)
    rewritten(quote, changed)
    with pytest.raises(UserError) as error:
        Patch("test", "always", "x", "y", "why", (quote,), "").where()
    message = str(error.value)
    assert message.startswith(f"{quote.distribution}: {name} ")
    assert re.match(r"(megatron-core|torch) \d+\.\d+", message)
    assert "\n" not in message


@pytest.mark.parametrize(("patch", "quote"), QUOTES, ids=NAMES)
def test_comments_and_layout_may_change(patch, quote, rewritten):
    """What a parser throws away, and lines that move, are no reason to refuse a patch."""
    tree = ast.parse(upstream(quote.where)[1])
    rewritten(quote, "# a licence\n" * 40 + ast.unparse(tree))
    assert quote.find()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("f(...)", "def g():\n    return [f(1, x=2)]"),
        ("a['b'] = c", 'def g():\n    a["b"] = (\n        c  # why\n    )'),
        ("def g(self, x, *_)", "class A:\n    def g(self, x: int, *, y=3, **z) -> int: ..."),
    ],
)
def test_what_is_the_same(code, text, rewritten):
    quote = Quote(f"torch.serialization{':A' if code.startswith('def') else ':g'}", code)
    rewritten(quote, text)
    assert quote.find().startswith("torch/serialization.py:2")


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        ("f(...)", "def g():\n    return h(1)", "no longer contains `f(...)` in g"),
        ("f(...)", "def h():\n    return f(1)", "no longer has g"),
        ("def g(self)", "class A:\n    def g(self, x): ...", "has A.g(self, x), not"),
        ("def g(self, x, *_)", "class A:\n    def g(self): ...", "has A.g(self), not"),
        ("def g(self)", "class A:\n    x = 1\nclass B:\n    def g(self): ...", "no longer has A.g"),
    ],
)
def test_what_is_another(code, text, said, rewritten):
    quote = Quote(f"torch.serialization{':A' if code.startswith('def') else ':g'}", code)
    rewritten(quote, text)
    with pytest.raises(patch_register.MovedError, match=re.escape(said)):
        quote.find()


def test_a_replacement_is_undone_where_it_was_made():
    class Base:
        def inherited(self):
            return 1

        @staticmethod
        def static():
            return 2

    class Upstream(Base):
        own = Base.static

    patch = Patch("test", "always", "sys", "x", "why", (), "")
    before = dict(vars(Upstream))
    with patch.replacing(Upstream, inherited=lambda self: 3, own=4):
        assert (Upstream().inherited(), Upstream.own) == (3, 4)
        assert patch.is_active
        with patch_register.suspended("always"):
            assert (Upstream().inherited(), Upstream.own()) == (1, 2)
        assert Upstream.own == 4
    with pytest.raises(RuntimeError), patch.replacing(Base, static=5):
        raise RuntimeError
    assert Base().static() == 2
    assert dict(vars(Upstream)) == before
    assert not patch.is_active


def test_a_patch_ends_with_the_release_that_needs_none(monkeypatch):
    class Upstream:
        own = 1

    gone = (Quote("megatron.core.utils", "def nothing_of_the_kind()"),)
    patch = Patch("test", "always", "sys", "own", "why", gone, "", fixed_in="0.20")
    for version, needed in (("0.19.2", True), ("0.20.0", False), ("0.20.0rc1", False)):
        monkeypatch.setattr(patch_register, "version_of", lambda package, found=version: found)
        assert patch.is_needed == needed
        if needed:
            with pytest.raises(UserError, match="no longer has nothing_of_the_kind"):
                patch.apply(Upstream, own=2)
        else:
            assert patch.where() == patch.apply(Upstream, own=2) == []
        assert Upstream.own == 1


def test_an_attribute_that_is_gone_is_refused():
    patch = Patch("test", "always", "sys", "x", "why", (Quote("torch", "import os"),), "")
    with pytest.raises(UserError, match=r"torch 2\.\S+: sys no longer has nothing_there"):
        patch.apply(nothing_there=1)
    assert not hasattr(sys, "nothing_there")


UPSTREAM = ("megatron", "torch", "transformers", "transformer_engine")


def assignments(path):
    """Lines that set an attribute of something imported from upstream, or call setattr on it."""
    tree = ast.parse(path.read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.name, a.asname or a.name.partition(".")[0]) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", a.asname or a.name) for a in node.names]
        else:
            continue
        imported |= {local for name, local in names if name.partition(".")[0] in UPSTREAM}
    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            targets = [ast.Attribute(value=node.args[0])]
        elif not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        for target in targets:
            base = target
            while isinstance(base, ast.Attribute):
                base = base.value
            if base is not target and getattr(base, "id", None) in imported:
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_nothing_of_upstream_is_replaced_beside_the_register(tmp_path, monkeypatch):
    files = sorted((ROOT / "megasink").rglob("*.py"))
    # Upstream's own place for the process that is there, emptied after it was ended; groups that
    # upstream forgets at the end of its parallel state; an option of torch; and processes that
    # stand in for a rank, which train nothing.
    plan = {f"megasink/plan/{name}.py" for name in ("hollow/lone_rank", "rank_step")}
    allowed = {"megasink/training/checkpoint_writer.py", *plan}
    allowed |= {"megasink/megatron/process_groups.py", "megasink/cpu/prepare_process.py"}
    found = [place for path in files for place in assignments(path)]
    assert {place.partition(":")[0] for place in found} == allowed, found
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from megatron.training import training\nimport torch.cuda\n"
        "training.train = None\nsetattr(torch.cuda, 'x', 1)\ndef f(x):\n    x.y = 1\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(assignments(planted)) == ["planted.py:3", "planted.py:4"]


def test_the_page_has_every_patch():
    """In the order of the register: why, since when upstream needs it no more, and what ends it."""
    page = (ROOT / "megasink" / "upstream" / "README.md").read_text()
    page = page.partition("## Deprecations")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "patch"]
    rooms = ("always", "training", "loading", "platform")
    wanted = sorted(TABLE, key=lambda patch: rooms.index(patch.room))
    assert [row[:3] for row in rows] == [[p.name, p.reason, p.fixed_in or "–"] for p in wanted]
    for row, patch in zip(rows, wanted, strict=True):
        assert len(row) == (3 if patch.room == "platform" else 4), patch.name
        assert (patch.fixed_in is not None) <= (row[-1] == "None: it is there."), patch.name


def test_doctor_names_what_does_not_match(capsys, monkeypatch):
    gone = Quote("torch.serialization", "def load_from_a_pickle(f)")
    table = (replace(TABLE[0], quotes=(gone,)),)
    monkeypatch.setattr("megasink.cli.doctor_self_test.TABLE", table)
    monkeypatch.setattr("megasink.cli.doctor_self_test.training_step", lambda device: "")
    assert megasink(["doctor"]) == 1
    assert "torch/serialization.py no longer has load_from_a_pickle" in capsys.readouterr().out
