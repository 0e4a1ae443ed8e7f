"""``megasink doctor``: list installed packages and the kernels that will run, and test both."""

import importlib.metadata
from collections.abc import Sequence
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

import megasink
from megasink import cpu, plugins
from megasink.attention.variants import variants
from megasink.console.json_output import add_json, as_text
from megasink.cpu import broken_packages
from megasink.errors import UserError
from megasink.options.command_parser import CommandParser
from megasink.tried import numbers_of
from megasink.upstream import fused_kernels
from megasink.upstream.versions import version_of, versions

_PYTHON = ((3, 12), (3, 14))
# pyproject.toml says what they are for.
EXTRAS = tuple("train gpu flash-attn-4 finetune muon eval eval-long gguf storage".split())
BASE = ""


class Package(NamedTuple):
    """A requirement of megasink or of one of its extras, by megasink's own metadata."""

    name: str  # Name on PyPI
    extra: str  # The extra that requires it; "" for `pip install megasink`
    supported: str  # Versions as pip writes them, such as ">=2.11"; "" for any
    installed: str | None  # The installed version, or None

    @property
    def problem(self) -> str | None:
        """Why megasink cannot work with it, and the fix; an extra may be absent."""
        install = f"pip install '{self.name}{self.supported}'"
        if self.installed is None:
            return None if self.extra else f"{self.name} is not installed: {install}"
        fits = Requirement(self.name + self.supported).specifier
        if fits.contains(self.installed, prereleases=True):
            return None
        return f"{self.name} {self.installed} is not supported: {install}"


def main(argv: Sequence[str] | None = None) -> int:
    """List installed and missing packages and the kernels that run here, and test them.

    Exits with 1 if an installed package is unsupported or a test fails; with --attention, if a case
    is wrong, or a feature has no effect, or no case runs.
    """
    parser = CommandParser(prog="megasink doctor", description=main.__doc__)
    plugins.add_flag(parser)
    parser.add_argument("--head-dim", type=int, default=64, help="head dimension; default: 64")
    parser.add_argument("--window", type=int, help="sliding window in tokens, query included")
    parser.add_argument("--no-self-test", action="store_true", help="do not run kernels or a model")
    text = (
        "only compare an implementation of attention with the definition, case by case: an "
        "attn_implementation of transformers, a core attention of Megatron (MODULE:CLASS), or a "
        "kernel of megasink"
    )
    parser.add_argument("--attention", metavar="NAME", help=text)
    add_json(parser)
    args = parser.first_screen("megasink doctor").parse_args(argv)
    for flag, value in (("--head-dim", args.head_dim), ("--window", args.window)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: use 1 or more")

    console = Console(quiet=args.json)
    if args.attention is not None:
        from megasink.cli.doctor_attention import report as conformance

        compared, code = conformance(args.attention, args.head_dim, console)
        if args.json:
            print(as_text(compared))
        return code
    installed = packages()
    problems = list(dict.fromkeys(package.problem for package in installed if package.problem))
    python = versions()["python"]
    if not _PYTHON[0] <= numbers_of(python)[:2] < _PYTHON[1]:
        problems.insert(0, f"Python {python} is not supported: use 3.12 or 3.13")
    report: dict[str, Any] = {"megasink": megasink.__version__, "versions": versions()}
    report["packages"] = [package._asdict() for package in installed]
    report["plugins"] = [str(plugin) for plugin in plugins.LOADED.values()]
    _print_packages(console, installed, report)
    if version_of("torch") is not None:
        broken_packages.block_broken_packages()
        problems += broken_packages.describe()
        problems += _machine(console, args, report)
    report |= {"problems": problems, "ok": not problems}
    if args.json:
        print(as_text(report))
    for problem in problems:
        _plain(console, f"FAIL  {problem}")
    if not problems:
        _plain(console, "no problem found")
    return 1 if problems else 0


def packages() -> list[Package]:
    """Return the requirements of megasink and its extras here; none if it is not installed."""
    try:
        texts = importlib.metadata.requires("megasink") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    packages: dict[tuple[str, str], Package] = {}
    for requirement in map(Requirement, texts):
        for extra in (BASE, *EXTRAS):
            name, marker = requirement.name, requirement.marker
            # With an extra, requirements without it hold as well; an extra may ask for
            # another.
            wanted = (marker is None) == (extra == BASE) and name != "megasink"
            if wanted and (marker is None or marker.evaluate({"extra": extra})):
                supported = str(requirement.specifier)
                packages[extra, name] = Package(name, extra, supported, version_of(name))
    return list(packages.values())


def _print_packages(console: Console, installed: list[Package], report: dict[str, Any]) -> None:
    supported = {package.name: package.supported for package in reversed(installed)}
    lines = [("megasink", megasink.__version__)]
    for name, version in report["versions"].items():
        allowed = supported.get(name)
        lines.append((name, f"{version} (supported: {allowed})" if allowed else version))
    if not installed:
        lines.append(("requirements", "unknown, since megasink is on the path but not installed"))
    for extra in EXTRAS if installed else ():
        absent = [p.name for p in installed if p.extra == extra and p.installed is None]
        lacks = f"lacks {', '.join(absent)}: pip install 'megasink[{extra}]'"
        lines.append((f"megasink[{extra}]", lacks if absent else "installed"))
    lines += [("plugin", plugin) for plugin in report["plugins"]]
    for what, text in lines:
        _plain(console, f"{what:20} {text}")


def _machine(console: Console, args: Any, report: dict[str, Any]) -> list[str]:
    """Report device and kernels, and test them; return the failures."""
    try:
        unusable = cpu.unusable_gpu()
        device_type, name = _device(unusable)
        rows = _kernels(device_type, args.head_dim, args.window)
    except ImportError as error:  # this command is for broken installations
        return [f"torch cannot be imported: {error}"]
    report |= {"device": {"type": device_type, "name": name}, "kernels": rows}
    _plain(console, f"{'device':20} {name}")
    table = Table(title=f"attention kernels on {device_type}, with the balance gradient")
    for column in ("variant", "dtype", "runs", "why not others"):
        table.add_column(column)
    for row in rows:
        others: dict[str, list[str]] = {}
        for other, reason in row["not_attention"].items():
            others.setdefault(reason, []).append(other)
        why = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in others.items())
        table.add_row("\n".join(row["variants"]), row["dtype"], row["attention"], why)
    console.print(table)
    for row in {row["dtype"]: row for row in rows}.values():
        reasons = "; ".join(f"not {other}: {why}" for other, why in row["not_gates"].items())
        _plain(console, f"gate kernel in {row['dtype']}: {row['gates']} ({reasons})")
    if any(row["gates"] == "triton" for row in rows):
        from megasink.attention.gate_kernels.triton_launch import looked_up_because

        if reason := looked_up_because():
            report["slow_launches"] = reason
            _plain(console, f"gate kernels take longer to launch: {reason}")
    for line in dict.fromkeys(row["faster"] for row in rows if row["faster"]):
        _plain(console, f"{'faster':20} {line}")
    problems = [unusable] if unusable else []
    if args.no_self_test:
        return problems
    from megasink.cli.doctor_self_test import checks

    done = []
    for check in checks(device_type, args.head_dim, args.window):
        done.append(check)
        verdict = "pass" if check.passed else "FAIL"
        _plain(console, f"{verdict}  {check.name}: {check.detail} ({check.seconds:.1f} s)")
    report["self_test"] = [check._asdict() for check in done]
    return problems + [f"{check.name}: {check.detail}" for check in done if not check.passed]


def _plain(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _device(unusable: str | None) -> tuple[str, str]:
    """Return ("cuda" or "cpu", a description of it or why there is no other)."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return "cuda", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return "cpu", unusable or "no CUDA device: using the CPU platform"


def _kernels(device_type: str, head_dim: int, window: int | None) -> list[dict[str, Any]]:
    """Return the kernels by dtype, for the variants that use the same one."""
    import torch

    from megasink.attention import AttentionRequest, choose_backend, choose_gate_kernels

    capability = torch.cuda.get_device_capability() if device_type == "cuda" else None
    named: dict[str, list[str]] = {}
    for record in variants():
        named.setdefault("sink" if record.always_gated else "vanilla", []).append(record.name)
    rows = []
    for variant, names in named.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            request = AttentionRequest(
                device_type, dtype, head_dim, variant, window, compute_capability=capability
            )
            attention, gates = choose_backend(request), choose_gate_kernels(request)
            rows.append(
                {
                    "variants": names,
                    "dtype": str(dtype).removeprefix("torch."),
                    "attention": attention.name,
                    "not_attention": attention.reasons,
                    "faster": fused_kernels.faster(attention) if device_type == "cuda" else None,
                    "gates": gates.name,
                    "not_gates": gates.reasons,
                }
            )
    return rows
