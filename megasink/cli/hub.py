"""Use the Hugging Face hub if a command line asks for it: fetch a model, push an export."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megasink
from megasink.errors import UserError
from megasink.files.system_errors import is_hub_name

# Only data: no pickles, no code, no folders inside.
_FETCHED = [
    *("*.json", "*.safetensors", "*.txt", "*.jinja", "*.tiktoken"),
    *("tokenizer.model", "spiece.model", "README.md", "LICENSE*"),
]


def add_allow_download(parser: argparse.ArgumentParser, also: str = "") -> None:
    """Add ``--allow-download``; `also` names its other downloads."""
    text = f"fetch MODEL if it is a name on the Hugging Face hub{also}; only safetensors weights"
    parser.add_argument("--allow-download", action="store_true", help=text)


def waits_for_download(args: argparse.Namespace) -> bool:
    """Return whether MODEL is a name of the hub that the command line allows to fetch."""
    return args.allow_download and not args.model.exists() and is_hub_name(args.model)


def fetched(args: argparse.Namespace) -> Path:
    """Return the folder of MODEL; fetch it into the hub's cache if necessary."""
    if not waits_for_download(args):
        return Path(args.model)
    name = str(args.model)
    with _online(name) as hub:
        from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

        info = hub.model_info(name, timeout=HF_HUB_ETAG_TIMEOUT)
        files = [file.rfilename for file in info.siblings or ()]
        if "config.json" not in files or not any(f.endswith(".safetensors") for f in files):
            raise UserError(
                f"{name} on the hub lacks config.json or safetensors: choose a model that has both "
                "(other weights, such as pickles, may run code and are not fetched)"
            )
        folder = Path(
            hub.snapshot_download(
                name, revision=info.sha, allow_patterns=_FETCHED, ignore_patterns=["*/*"]
            )
        )
    print(f"fetched {name}: {folder}", file=sys.stderr)
    return folder


def refuse_push(repository: str) -> None:
    """Refuse to push before anything is exported, if the token is missing or rejected."""
    from huggingface_hub import get_token, utils

    with _online(f"--push {repository}") as hub:
        utils.validate_repo_id(repository)
        if get_token() is None:
            raise UserError(
                f"--push {repository}: no token for the Hugging Face hub: run hf auth login, or "
                "set HF_TOKEN"
            )
        hub.whoami()


def push(folder: Path, repository: str) -> None:
    """Upload a verified export."""
    failed = f"--push {repository} failed; upload {folder} with hf upload {repository} {folder}"
    with _online(failed) as hub:
        url = hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            commit_message=f"Export by megasink {megasink.__version__}",
        )
    print(f"pushed to {url}")


def stay_offline() -> None:
    """Keep packages imported later from fetching anything unasked."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if constants := sys.modules.get("huggingface_hub.constants"):
        vars(constants)["HF_HUB_OFFLINE"] = True


@contextlib.contextmanager
def _online(what: str) -> Iterator[Any]:
    """Yield the hub's client; its errors are one line."""
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.utils import disable_progress_bars

    # These include the HTTP package's error, which changes with the client's release.
    failures: tuple[Any, ...] = (*errors.HfHubHTTPError.__bases__, OSError)
    if not sys.stderr.isatty():
        disable_progress_bars()
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield HfApi()
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{what}: the hub has no such model, or this account has no access (hf auth login)"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"{what}: not a valid name on the Hugging Face hub: {error}") from error
    except failures as error:
        if isinstance(error, OSError) and error.filename is not None:  # of the cache's disk
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{what}: {constants.ENDPOINT} did not answer: {reason}") from error
    finally:
        constants.HF_HUB_OFFLINE = before
