"""The corpus of documentation: pages, packages, repetitions; nothing is downloaded."""

import hashlib
import io
import json
import re
import tarfile

import pytest

from examples.replicate import corpora
from examples.replicate.corpora import Source, fetch, make_text, read_sources
from examples.replicate.debian_package import files_of
from examples.replicate.html_text import text_of_html
from megasink.errors import ConfigError, UserError

PAGE = """<!doctype html><html><head><title>t</title><style>p{}</style></head><body>
<nav>skip <a href=x>me</a></nav><div class="sphinxsidebar">skip too</div>
<main><h1>Title<a class="headerlink" href="#t">#</a></h1>
<p>Some   <b>bold</b>
text &amp; more.</p><pre>def f():
    return  1
</pre><ul><li>one</li><li>two</li></ul><table><tr><td>a</td><td>b</td></tr></table>
<script>skip()</script> tail</main><footer>skip</footer></body></html>"""


def prose(seed, words=120):
    """A paragraph of its own."""
    return " ".join(hashlib.sha256(f"{seed} {i}".encode()).hexdigest()[:6] for i in range(words))


def words_of(number):
    """Letters alone, so that the text counts as English."""
    return prose(number).translate(str.maketrans("0123456789", "ghijklmnop"))


def deb(files, *, links=()):
    """The bytes of a Debian package with these files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, contents in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    made = b"!<arch>\n"
    for name, contents in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", b"odd"),
        ("data.tar.xz", data.getvalue()),
    ):
        made += f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(contents):<10}`\n".encode()
        made += contents + b"\n" * (len(contents) % 2)
    return made


def page(*paragraphs):
    return "".join(f"<p>{text}</p>" for text in paragraphs).encode()


def test_the_text_of_a_page():
    assert text_of_html(PAGE.encode()) == (
        "Title\n\nSome bold text & more.\n\ndef f():\n    return  1\n\none\n\ntwo\n\n\ta\tb\n\ntail"
    )


def test_the_files_of_a_package_are_read_and_none_is_written(tmp_path):
    package = tmp_path / "a.deb"
    package.write_bytes(deb({"./usr/a.html": b"x", "../../b": b"yy"}, links=[("./c", "/etc")]))
    assert list(files_of(package)) == [("/usr/a.html", b"x"), ("/../../b", b"yy")]
    assert [path.name for path in tmp_path.iterdir()] == ["a.deb"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: b"PK" + whole, "no ar archive"),
        (lambda whole: whole[:70], "no data.tar"),
        (lambda whole: whole[:-60], "is damaged"),
        (lambda whole: whole.replace(b"data.tar", b"date.tar"), "no data.tar"),
    ],
)
def test_a_damaged_package_is_named(damage, message, tmp_path):
    package = tmp_path / "a.deb"
    package.write_bytes(damage(deb({"./a": bytes(range(256)) * 20})))
    with pytest.raises(UserError, match=re.escape(message)):
        list(files_of(package))


def source(name, contents, folder):
    """A source whose file is there."""
    of = Source(
        name=name,
        version="1:2-3",
        url=f"https://deb.debian.org/pool/{name}_2-3_all.deb",
        sha256=hashlib.sha256(contents).hexdigest(),
        take=r"/html/.*\.html$",
        license="MIT",
    )
    assert of.file_name == f"{name}_1%3a2-3_all.deb"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / of.file_name).write_bytes(contents)
    return of


def test_repetitions_go_and_no_document_is_in_both_parts(tmp_path):
    shared, numbers = words_of("shared"), "12 34 56 " * 60
    first = {f"./html/{i}.html": page(words_of(i), shared) for i in range(60)}
    first |= {"./html/numbers.html": page(numbers), "./other/x.html": page(words_of("x"))}
    second = {"./html/again.html": page(words_of(1), shared), "./html/new.html": page(words_of(99))}
    downloads = tmp_path / "downloads"
    sources = [source("one", deb(first), downloads), source("two", deb(second), downloads)]
    counts = make_text(tmp_path, sources, held_out=0.2)
    assert counts["one"].documents == 60
    assert counts["two"].documents == 1
    parts = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held-out")
    }
    texts = {name: [document["text"] for document in part] for name, part in parts.items()}
    assert len(texts["train"]) + len(texts["held-out"]) == 61
    assert 2 < len(texts["held-out"]) < 25
    everything = "".join(texts["train"] + texts["held-out"])
    assert everything.count(shared) == 1
    assert everything.count(words_of(1)) == 1
    assert numbers not in everything
    assert words_of("x") not in everything
    facts = json.loads((tmp_path / "sources.json").read_text())
    assert [fact["documents"] for fact in facts] == [60, 1]
    assert facts[0]["license"] == "MIT"
    # One source fewer: no document changes its part.
    make_text(tmp_path, sources[:1], held_out=0.2)
    fewer = (tmp_path / "held-out.jsonl").read_text().splitlines()
    assert {json.loads(line)["text"] for line in fewer} <= set(texts["held-out"])


def test_every_file_that_is_missing_or_different_is_named(tmp_path, monkeypatch):
    good = source("good", deb({}), tmp_path)
    changed, absent = source("changed", deb({}), tmp_path), source("absent", deb({}), tmp_path)
    (tmp_path / changed.file_name).write_bytes(b"other")
    (tmp_path / absent.file_name).unlink()
    monkeypatch.setattr(corpora.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as told:
        fetch(tmp_path, [good, changed, absent])
    problems = told.value.problems
    assert len(problems) == 3
    assert "changed 1:2-3" in problems[0]
    assert "sha256" in problems[0]
    assert "absent 1:2-3: there is no apt-get" in problems[1]
    assert "snapshot.debian.org" in problems[2]


def test_every_source_is_whole():
    sources = read_sources()
    assert len(sources) > 20
    for of in sources.values():
        assert re.fullmatch("[0-9a-f]{64}", of.sha256)
        assert re.fullmatch(r"https://deb\.debian\.org/[^ ]+_(all|amd64)\.deb", of.url)
        assert of.license
        assert re.compile(of.take)
