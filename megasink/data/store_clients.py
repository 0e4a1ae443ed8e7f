"""The libraries behind megasink.data.object_store: one for each scheme, imported when it is called.

Their methods raise what the library raises, and ModuleNotFoundError if it is not installed.
"""

import contextlib
import functools
import importlib
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_opening = threading.Lock()  # boto3 makes one client at a time


class Object(NamedTuple):
    """An object: its size in bytes, and the seconds since 1970 of its last change."""

    size: int
    changed: float


class Client(Protocol):
    """What megasink does with the objects of a store; all paths are whole URLs."""

    def look(self, url: str) -> Object | None:
        """Return what the store tells of an object; None if there is none."""

    def read(self, url: str, start: int, size: int) -> bytes:
        """Return some bytes of an object."""

    def download(self, url: str, path: Path) -> None:
        """Write an object to a file."""

    def write(self, url: str, content: bytes) -> None:
        """Write a small object, in place of one that is there."""

    def upload(self, url: str, path: Path) -> None:
        """Write a file to an object, as `write` does."""

    def remove(self, url: str) -> None:
        """Delete an object, if there is one."""

    def keys(self, url: str) -> list[str]:
        """Return the keys of the objects below a URL."""


class Boto3:
    """s3://bucket/key."""

    def look(self, url: str) -> Object | None:
        client, place = _s3(url)
        from botocore.exceptions import ClientError

        try:
            told = client.head_object(**place)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        return Object(told["ContentLength"], told["LastModified"].timestamp())

    def read(self, url: str, start: int, size: int) -> bytes:
        client, place = _s3(url)
        body = client.get_object(**place, Range=f"bytes={start}-{start + size - 1}")["Body"]
        return bytes(body.read())

    def download(self, url: str, path: Path) -> None:
        client, place = _s3(url)
        client.download_file(**place, Filename=str(path))

    def write(self, url: str, content: bytes) -> None:
        client, place = _s3(url)
        client.put_object(**place, Body=content)

    def upload(self, url: str, path: Path) -> None:
        client, place = _s3(url)
        client.upload_file(**place, Filename=str(path))

    def remove(self, url: str) -> None:
        client, place = _s3(url)
        client.delete_object(**place)

    def keys(self, url: str) -> list[str]:
        client, place = _s3(url)
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=place["Bucket"], Prefix=f"{place['Key']}/"
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


class MultiStorage:
    """msc://profile/key."""

    def look(self, url: str) -> Object | None:
        try:
            told = _msc().info(url)
        except FileNotFoundError:
            return None
        if told.type != "file":
            return None
        return Object(told.content_length, told.last_modified.timestamp())

    def read(self, url: str, start: int, size: int) -> bytes:
        client, path = _msc().resolve_storage_client(url)
        wanted = _msc().types.Range(offset=start, size=size)
        return bytes(client.read(path=path, byte_range=wanted))

    def download(self, url: str, path: Path) -> None:
        _msc().download_file(url, str(path))

    def write(self, url: str, content: bytes) -> None:
        _msc().write(url, content)

    def upload(self, url: str, path: Path) -> None:
        _msc().upload_file(url, str(path))

    def remove(self, url: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _msc().delete(url)

    def keys(self, url: str) -> list[str]:
        keys = (entry.key.partition("://")[2] for entry in _msc().list(f"{url}/"))
        return [key.partition("/")[2] for key in keys]


# Schemes of core/datasets/object_storage_utils.py:16.
CLIENTS: dict[str, Client] = {"s3://": Boto3(), "msc://": MultiStorage()}


def _s3(url: str) -> tuple[Any, dict[str, str]]:
    importlib.import_module("boto3")  # each caller is told if it is missing
    bucket, _, key = url.removeprefix("s3://").partition("/")
    set_now = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    with _opening:
        return _s3_client(set_now), {"Bucket": bucket, "Key": key}


@functools.lru_cache(1)
def _s3_client(_: tuple[tuple[str, str], ...]) -> Any:
    import boto3

    return boto3.client("s3")  # for all threads


def _msc() -> Any:
    import multistorageclient

    return multistorageclient
