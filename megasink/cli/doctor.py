"""``megasink doctor``: what is installed, the kernels that will run, and whether they are right."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

import megasink
from megasink import plugins
from megasink.cli.installation.packages import BASE, EXTRAS, Package, install_line, packages
from megasink.command_line import CommandParser
from megasink.errors import UserError
from megasink.extras import have_megatron
from megasink.json_output import add_json, as_text
from megasink.tried import numbers_of
from megasink.upstream.table import TABLE
from megasink.upstream.versions import version_of, versions

_PYTHON = ((3, 12), (3, 14))


def main(argv: Sequence[str] | None = None) -> int:
    """Say what is installed and missing, which kernels run here and why not others, and test them.

    Exits with 1 if something that is installed does not fit or a test failed.
    """
    parser = CommandParser(prog="megasink doctor", description=main.__doc__)
    plugins.add_flag(parser)
    parser.add_argument("--head-dim", type=int, default=64, help="head dimension; default: 64")
    parser.add_argument("--window", type=int, help="sliding window in tokens, including itself")
    parser.add_argument("--no-self-test", action="store_true", help="run no kernel and no model")
    parser.add_argument("--patches", action="store_true", help="list the patches of upstream code")
    add_json(parser)
    args = parser.first_screen("megasink doctor").parse_args(argv)
    for flag, value in (("--head-dim", args.head_dim), ("--window", args.window)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: use 1 or more")

    console = Console(quiet=args.json)
    told: dict[str, Any] = {"megasink": megasink.__version__, "versions": versions()}
    found = packages()
    problems = _problems(found)
    told["packages"] = [asdict(package) for package in found]
    told["plugins"] = [str(plugin) for plugin in plugins.LOADED.values()]
    _print_packages(console, found, told)
    if version_of("torch") is not None:
        problems += _machine(console, args, told)
    told |= {"problems": problems, "ok": not problems}
    if args.json:
        print(as_text(told))
    for problem in problems:
        console.print(f"FAIL  {problem}", highlight=False, markup=False, soft_wrap=True)
    if not problems:
        console.print("no problem found", highlight=False)
    return 1 if problems else 0


def _problems(found: list[Package]) -> list[str]:
    """Return what of the installation cannot work, with what to do."""
    problems = []
    python = versions()["python"]
    if not _PYTHON[0] <= numbers_of(python)[:2] < _PYTHON[1]:
        problems.append(f"Python {python} is not supported: use 3.12 or 3.13")
    mended = set()
    for package in found:
        if package.is_outside and package.name not in mended:
            problem = f"{package.name} {package.installed} is not supported: {package.install}"
        elif package.installed is None and package.extra == BASE:
            problem = f"{package.name} is not installed: {package.install}"
        else:
            continue
        mended.add(package.name)
        problems.append(problem)
    return problems


def _print_packages(console: Console, found: list[Package], told: dict[str, Any]) -> None:
    def line(what: str, text: str) -> None:
        console.print(f"{what:20} {text}", highlight=False, markup=False, soft_wrap=True)

    supported = {package.name: package.supported for package in reversed(found)}
    line("megasink", megasink.__version__)
    for name, version in told["versions"].items():
        asked = supported.get(name)
        line(name, f"{version} (supported: {asked})" if asked else version)
    if not found:
        line("requirements", "unknown, since megasink is on the path but not installed")
    for extra in EXTRAS if found else ():
        absent = [p.name for p in found if p.extra == extra and p.installed is None]
        state = f"lacks {', '.join(absent)}: {install_line(extra)}" if absent else "installed"
        line(f"megasink[{extra}]", state)
    for plugin in told["plugins"]:
        line("plugin", plugin)


def _machine(console: Console, args: Any, told: dict[str, Any]) -> list[str]:
    """Tell about device and kernels, and test them; return what failed."""
    try:
        from megasink.cli.installation.kernels import device, kernels
    except ImportError as error:  # a broken installation is what this command is for
        return [f"torch cannot be imported: {error}"]
    device_type, name = device()
    told["device"] = {"type": device_type, "name": name}
    console.print(f"{'device':20} {name}", highlight=False, markup=False, soft_wrap=True)
    rows = kernels(device_type, args.head_dim, args.window)
    told["kernels"] = [row.as_json() for row in rows]
    table = Table(title=f"attention kernels on {device_type}, with the balance gradient")
    for column in ("variant", "dtype", "runs", "why not others"):
        table.add_column(column)
    for row in rows:
        others: dict[str, list[str]] = {}
        for other, reason in row.attention.reasons.items():
            others.setdefault(reason, []).append(other)
        why = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in others.items())
        table.add_row("\n".join(row.variants), row.dtype, row.attention.name, why)
    console.print(table)
    for dtype, gates in {row.dtype: row.gates for row in rows}.items():
        console.print(f"gates around them in {dtype}: {gates}", highlight=False, markup=False)
    if args.patches and have_megatron():
        _print_patches(console, device_type == "cuda")
    if args.no_self_test:
        return []
    from megasink.cli.installation.self_test import checks

    done = []
    for check in checks(device_type, args.head_dim, args.window):
        done.append(check)
        verdict = "pass" if check.passed else "FAIL"
        console.print(
            f"{verdict}  {check.name}: {check.detail} ({check.seconds:.1f} s)",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    told["self_test"] = [asdict(check) for check in done]
    return [f"{check.name}: {check.detail}" for check in done if not check.passed]


def _print_patches(console: Console, cuda: bool) -> None:
    """Print the patches of upstream and the upstream lines that they rest on."""
    in_force = {
        "platform": "off: a CUDA device is present" if cuda else "on: no CUDA device is present",
        "always": "on, in every process that uses Megatron",
        "training": "on during training",
        "loading": "on while a checkpoint loads",
    }
    for room, when in in_force.items():
        table = Table(title=f"patches of upstream, {when}", show_lines=True)
        for column in ("patch", "replaces", "why", "upstream lines"):
            table.add_column(column)
        for patch in (patch for patch in TABLE if patch.room == room):
            try:
                lines = "\n".join(patch.where()) or "off: not installed"
                if not patch.is_needed:
                    lines = f"off: mended in {patch.quotes[0].package} {patch.mended}"
            except UserError:
                lines = "off: no longer found"
            table.add_row(patch.name, f"{patch.owner}: {patch.attributes}", patch.reason, lines)
        console.print(table)
