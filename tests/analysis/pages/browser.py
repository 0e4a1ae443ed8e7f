"""A page in headless Chromium: what it shows, loads and complains about.

Measured by a script that is added to a copy of the page, with a policy that lets it run.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

# Not looked for on the path: Ubuntu's `chromium-browser` only tells what to install.
CHROMIUM = os.environ.get("MEGASINK_TEST_CHROMIUM")

_MEASURE = """
<script>
window.addEventListener('load', () => {
  const images = [...document.images];
  parent.postMessage(JSON.stringify({
    width: document.documentElement.clientWidth,
    scroll: document.documentElement.scrollWidth,
    images: images.length,
    blank: images.filter(i => !(i.complete && i.naturalWidth > 0)).map(i => i.alt),
    unnamed: images.filter(i => !i.alt).length,
    outside: images.filter(i => !i.closest('.scroll'))
      .filter(i => i.getBoundingClientRect().right > innerWidth + 1).length,
    titled: document.querySelectorAll('.picture rect title').length,
    askew: [...document.querySelectorAll('.picture svg')].filter(svg => {
      const [i, s] = [svg.previousElementSibling, svg].map(e => e.getBoundingClientRect());
      return Math.abs(i.width - s.width) + Math.abs(i.height - s.height) > 1
        || Math.abs(i.left - s.left) + Math.abs(i.top - s.top) > 1;
    }).length,
    tables: document.querySelectorAll('figure details table').length,
    least: Math.min(...images.map(i => i.getBoundingClientRect().width)),
    scripts: document.scripts.length - 1,
    fetched: [...document.querySelectorAll('[src], link[href]')].map(e => e.src || e.href)
      .filter(address => !address.startsWith('data:')),
    headings: [...document.querySelectorAll('h1, h2')].map(h => h.textContent),
  }), '*');
});
</script>
"""

# Chromium makes no window narrower than 500 pixels; a frame has any width.
_COLLECT = """
<!doctype html><link rel="icon" href="data:,"><pre id="measured">[]</pre><script>
const measured = document.getElementById('measured');
window.addEventListener('message', e => {
  measured.textContent = JSON.stringify([...JSON.parse(measured.textContent), JSON.parse(e.data)]);
});
</script>
"""
_FRAME = '<iframe src="{}" style="width: {}px; height: 900px; border: 0"></iframe>'


@dataclass
class Seen:
    """What Chromium made of a page.

    Attributes:
        measured: by width, see `_MEASURE`.
        console: lines of the page's console, the policy's refusals among them.
    """

    measured: dict[int, dict[str, Any]]
    console: list[str]


def seen(page: Path, widths: Sequence[int], folder: Path) -> Seen:
    """Load the page in a frame of each width.

    Args:
        folder: for copies and the browser's profile.
    """
    html = page.read_text().replace("default-src 'none'", "script-src 'unsafe-inline'")
    (folder / "copy.html").write_text(html.replace("</body>", f"{_MEASURE}</body>"))
    frame = folder / "frame.html"
    frames = "".join(_FRAME.format("copy.html", width) for width in widths)
    frame.write_text(_COLLECT + frames)
    flags = ("--dump-dom", "--window-size=1400,1000", "--virtual-time-budget=10000")
    dom, console = _chromium(frame, folder, *flags)
    found = re.search(r'<pre id="measured">([^<]+)</pre>', dom)
    assert found, dom[-2000:]
    measured = {one["width"]: one for one in json.loads(unescape(found[1]))}
    return Seen(measured, console)


def console_of(page: Path, folder: Path) -> list[str]:
    """The console of the page as it is, under its own policy."""
    return _chromium(page, folder, "--dump-dom")[1]


def _chromium(page: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    assert CHROMIUM is not None
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
    )
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return result.stdout, console
