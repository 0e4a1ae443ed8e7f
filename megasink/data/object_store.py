"""URLs of object stores, s3:// and msc://, from which Megatron reads data sets."""

from pathlib import Path


def is_stored(path: str | Path) -> bool:
    """Return whether a path is a URL of an object store, or `Path`'s form of one."""
    return str(path).startswith(("s3:/", "msc:/"))


def url_problem(url: str) -> str | None:
    """Return the problem of an object's URL, without the URL if it may contain a secret."""
    scheme, _, place = url.partition("://")
    if not place:
        return f"{url} is not the URL of an object: use s3://BUCKET/KEY or msc://PROFILE/KEY"
    if "@" in place or "?" in place:
        return (
            f"a {scheme}:// URL with '@' or '?' is rejected, because it would put credentials "
            "into the run folder: set them in the environment or in the library's own file"
        )
    names = place.split("/")
    # Megatron joins these to the folder of the indices (object_storage_utils.py:181).
    if len(names) < 2 or {"", ".", ".."} & set(names):
        return f"{url} does not name a bucket or profile and a key: give {scheme}://NAME/KEY"
    return None
