"""Checks of learning rates of their own: --embedding-lr and --output-lr."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.flags import flag_of


def problems(args: Namespace) -> Iterator[str]:
    given = {name: getattr(args, name) for name in ("embedding_lr", "output_lr")}
    given = {flag_of(name): rate for name, rate in given.items() if rate is not None}
    if not given:
        return
    for flag, rate in given.items():
        if not rate > 0:
            yield f"{flag} {rate}: use more than 0"
    flags = " and ".join(given)
    if args.decoupled_lr is not None:
        yield f"{flags} with --decoupled-lr, which sets the same rates: drop one or the other"
    if args.use_mup:
        yield f"{flags} with --use-mup: muP sets these learning rates; drop one of the two"
    if not args.untie_embeddings_and_output_weights:
        yield (
            f"{flags}: embedding and output layer are one matrix: add "
            "--untie-embeddings-and-output-weights, or use --decoupled-lr"
        )
