"""Objects in stores: s3://bucket/key through boto3, msc://profile/key through NVIDIA's
multi-storage-client, as Megatron reads data sets there.

Credentials are those of the libraries (environment, ~/.aws, the file of MSC_CONFIG); no error here
repeats what a library says, which may hold them.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasink.data.store_clients import CLIENTS, Client, Object
from megasink.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INSTALL = "pip install 'megasink[storage]'"


def is_stored(path: str | Path) -> bool:
    """Whether a path is a URL of an object store, or what `Path` makes of one."""
    return str(path).startswith(("s3:/", "msc:/"))


def url_problem(url: str) -> str | None:
    """Return what is wrong with the URL of an object, without the URL if it may hold a secret."""
    scheme = next((scheme for scheme in CLIENTS if url.startswith(scheme)), None)
    if scheme is None:
        return f"{url} is no URL of an object store: give s3://BUCKET/KEY or msc://PROFILE/KEY"
    place = url.removeprefix(scheme)
    if "@" in place or "?" in place:
        return (
            f"a {scheme} URL with '@' or '?' is not taken, since it would put credentials into the "
            "run folder: give them in the environment or in the library's own file"
        )
    names = place.split("/")
    # Megatron joins these to the folder of the indices (object_storage_utils.py:181).
    if len(names) < 2 or {"", ".", ".."} & set(names):
        return f"{url} does not name a bucket or profile and a key: give {scheme}NAME/KEY"
    return None


def look(url: str) -> Object | None:
    """Return what the store tells of an object; None if there is none.

    Raises:
        UserError: the library is not installed, or the store refuses or does not answer.
    """
    return _called(url, lambda client: client.look(url))


def local_prefix(prefix: str, cache: Path) -> str:
    """Return the prefix of the local index of a data set, where Megatron expects it."""
    return str(cache / prefix.partition("://")[2])


def fetch(prefix: str, cache: Path) -> str:
    """Download index and sidecar of a data set to where Megatron expects the index.

    What is there already is kept if it has the size and time of the object.

    Args:
        prefix: URL of the data set without ``.bin``.
        cache: --object-storage-cache-path.

    Returns:
        the prefix of the local files.

    Raises:
        UserError: errors of `look`, or a file that cannot be written.
    """
    local = local_prefix(prefix, cache)
    for suffix in (".idx", ".json"):
        url, path = prefix + suffix, Path(f"{local}{suffix}")
        found = look(url)
        try:
            if found is None:  # a data set of Megatron's own tool has no sidecar
                path.unlink(missing_ok=True)
                continue
            if path.is_file():
                facts = path.stat()
                if (facts.st_size, int(facts.st_mtime)) == (found.size, int(found.changed)):
                    continue
            path.parent.mkdir(parents=True, exist_ok=True)
            # One process of each node may do this in a folder that the nodes share.
            partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            try:
                download(url, partial)
                os.utime(partial, (found.changed, found.changed))
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    return local


class StoredTokens:
    """The tokens of a data set in a store; a slice is one request.

    Attributes:
        size: of the ``.bin`` in bytes.

    Raises:
        UserError: errors of `look`, or there is no such object.
    """

    def __init__(self, prefix: str):
        self.url = f"{prefix}.bin"
        found = look(self.url)
        if found is None:
            raise UserError(f"{self.url} not found")
        self.size = found.size

    def read(self, dtype: "np.dtype[Any]", part: slice) -> "NDArray[Any]":
        """Return the ids of a slice of [N] tokens."""
        import numpy as np  # a command line that is refused does not import it

        start, size = part.start * dtype.itemsize, (part.stop - part.start) * dtype.itemsize
        content = _called(self.url, lambda client: client.read(self.url, start, size))
        return np.frombuffer(content, dtype)


def read(url: str) -> bytes | None:
    """Return a small object; None if there is none.

    Raises:
        UserError: errors of `look`.
    """
    found = look(url)
    if found is None:
        return None
    return _called(url, lambda client: client.read(url, 0, found.size)) if found.size else b""


def download(url: str, path: Path) -> None:
    """Write an object to a file.

    Raises:
        UserError: errors of `look`.
        OSError: the file cannot be written.
    """
    _called(url, lambda client: client.download(url, path))


def write(url: str, content: bytes) -> None:
    """Write a small object, in place of one that is there: readers see one of them, whole.

    Raises:
        UserError: the library is not installed, or the store refuses or does not answer.
    """
    _called(url, lambda client: client.write(url, content), "written")


def upload(path: Path, url: str) -> None:
    """Write a file to an object, as `write` does.

    Raises:
        UserError: errors of `write`.
        OSError: the file cannot be read.
    """
    _called(url, lambda client: client.upload(url, path), "written")


def remove(url: str) -> None:
    """Delete an object, if there is one.

    Raises:
        UserError: errors of `write`.
    """
    _called(url, lambda client: client.remove(url), "deleted")


def names(url: str) -> list[str]:
    """Return the names of the objects below a URL, without the URL and its slash.

    Raises:
        UserError: errors of `look`.
    """
    found = _called(url, lambda client: client.keys(url))
    return sorted(
        key.partition(f"{url.partition('://')[2].partition('/')[2]}/")[2] for key in found
    )


def _called[Result](url: str, function: Callable[[Client], Result], doing: str = "read") -> Result:
    try:
        return function(CLIENTS[f"{url.partition('://')[0]}://"])
    except ModuleNotFoundError as error:
        raise UserError(f"{url} needs the package {error.name}: {INSTALL}") from None
    except OSError:
        raise
    except UserError:
        raise
    except Exception as error:  # each provider of multi-storage-client raises its own
        raise UserError(
            f"{url} cannot be {doing}: {_code(error)} (look at the credentials, the endpoint, and "
            "whether the bucket or profile is there)"
        ) from None


def _code(error: BaseException) -> str:
    """Return the store's code for an error, or the error's type: its text may hold credentials."""
    seen: BaseException | None = error
    while seen is not None:  # boto3 and multi-storage-client wrap it
        answer: Any = getattr(seen, "response", None)
        if isinstance(answer, dict) and (code := answer.get("Error", {}).get("Code")):
            return str(code)
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError):  # multi-storage-client's, around what happened
        error = error.__cause__ or error
    return type(error).__name__
