"""``megasink info``: installed versions, and the kernels that will run."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megasink import platform, plugins
from megasink.command_line import CommandParser
from megasink.errors import ConfigError, UserError
from megasink.extras import TRAIN, have_megatron
from megasink.upstream.table import TABLE
from megasink.upstream.versions import check_versions, versions


def main(argv: Sequence[str] | None = None) -> int:
    """Print versions, the attention kernel of each variant and dtype, and patches of upstream."""
    parser = CommandParser(prog="megasink info", description=main.__doc__)
    plugins.add_flag(parser)
    parser.add_argument("--head-dim", type=int, default=64, help="head dimension; default: 64")
    parser.add_argument("--window", type=int, help="sliding window in tokens, including itself")
    args = parser.parse_args(argv)
    for flag, value in (("--head-dim", args.head_dim), ("--window", args.window)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: use 1 or more")

    import torch

    from megasink.attention import AttentionRequest, Choice, choose_backend, choose_gate_kernels
    from megasink.variants import variants

    console = Console()
    for name, version in versions().items():
        console.print(f"{name:20} {version}", highlight=False)
    if have_megatron():
        check_versions()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    no_device = platform.unusable_gpu() or "no CUDA device: using the CPU platform"
    name = torch.cuda.get_device_name() if cuda else no_device
    console.print(f"{'device':20} {name}", highlight=False)
    for plugin in plugins.LOADED.values():
        console.print(f"{'plugin':20} {plugin}", highlight=False, markup=False)
    capability = torch.cuda.get_device_capability() if cuda else None
    table = Table(title=f"attention kernels on {device}, with the balance gradient")
    for column in ("variant", "dtype", "runs", "why not others"):
        table.add_column(column)
    kernels: dict[str, list[str]] = {}
    gates: dict[str, Choice] = {}
    for record in variants():
        kernels.setdefault(record.kernel.variant, []).append(record.name)
    for kernel, named in kernels.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            request = AttentionRequest(
                device_type=device,
                dtype=dtype,
                head_dim=args.head_dim,
                variant=kernel,
                window=args.window,
                compute_capability=capability,
            )
            choice = choose_backend(request)
            others: dict[str, list[str]] = {}
            for other, reason in choice.reasons.items():
                others.setdefault(reason, []).append(other)
            why = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in others.items())
            short = str(dtype).removeprefix("torch.")
            gates[short] = choose_gate_kernels(request)
            table.add_row("\n".join(named), short, choice.name, why)
    console.print(table)
    for short, choice in gates.items():
        why = "; ".join(f"not {name}: {reason}" for name, reason in choice.reasons.items())
        console.print(f"gates around them in {short}: {choice.name} ({why})", highlight=False)
    if not have_megatron():
        console.print(f"training: off, megatron-core is not installed: {TRAIN}", highlight=False)
        return 0
    if problems := _print_patches(console, cuda):
        raise ConfigError(problems)
    return 0


def _print_patches(console: Console, cuda: bool) -> list[str]:
    """Print the upstream patches and their upstream lines; return the problems found."""
    in_force = {
        "platform": "off: a CUDA device is present" if cuda else "on: no CUDA device is present",
        "always": "on, in every process that uses Megatron",
        "training": "on during training",
        "loading": "on while a checkpoint loads",
    }
    problems = []
    for room, when in in_force.items():
        table = Table(title=f"patches of upstream, {when}", show_lines=True)
        for column in ("patch", "replaces", "why", "upstream lines"):
            table.add_column(column)
        for patch in (patch for patch in TABLE if patch.room == room):
            try:
                lines = "\n".join(patch.where()) or "off: not installed"
                if not patch.is_needed:
                    lines = f"off: mended in {patch.quotes[0].package} {patch.mended}"
            except UserError as error:
                lines = "off: no longer found"
                problems.append(str(error))
            table.add_row(patch.name, f"{patch.owner}: {patch.attributes}", patch.reason, lines)
        console.print(table)
    return problems
