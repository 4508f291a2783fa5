"""A whole checkpoint, or its text, from a URI into a folder that the node's pods share.

`<folder>` is a link to `<folder>.all` or `<folder>.text`, which appear whole. Whoever fetches holds
`<folder>.lock`. A pod that fetches everything serves those that fetched the text alone, too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from baton.fetch.checkpoint_files import (
    ARCHIVES,
    Wanted,
    WantedFile,
    read_sums,
    unpack,
    wanted_files,
)
from baton.fetch.download import Download, Report
from baton.fetch.sources import CACHE, FetchError, S3Source, Source, WebSource

# --- the node's folder ----------------------------------------------------------------------------


_LOOK_S = 0.5
_REPORT_EVERY_S = 30.0


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a folder's name. The kernel releases the lock of a process that dies, and a
    fetch ends when nothing comes for long. So nobody waits longer than a fetch takes."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb") as lock:
        reported_at = None
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if reported_at is None or time.monotonic() - reported_at > _REPORT_EVERY_S:
                    reported_at = time.monotonic()
                    report("waiting for another pod of this node, which is fetching it")
            time.sleep(_LOOK_S)
        yield


def _lead(folder: Path, whole: Path) -> None:
    """Switch the folder's link in one step, for readers too."""
    link = _beside(folder, "link")
    link.unlink(missing_ok=True)
    link.symlink_to(whole.name)
    link.replace(folder)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- fetching -------------------------------------------------------------------------------------


_AT_ONCE = 4
"""Files fetched at the same time: one connection seldom fills a link."""


class Fetcher:
    """Fetches checkpoints. `environment` holds https's BEARER_TOKEN; boto3 reads its own variables.
    `pause_s` is the pause after a try in which nothing came; it doubles each time."""

    def __init__(
        self, environment: Mapping[str, str], report: Report, pause_s: float = 1.0
    ) -> None:
        self._environment, self._report, self._pause_s = environment, report, pause_s

    def fetch(self, uri: str, folder: Path, text_only: bool) -> None:
        """Bring the checkpoint of `uri` into `folder`, with `text_only` without weights. Raises
        FetchError."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(_beside(folder, "lock"), self._report):
                self._keep(uri, folder, text_only)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what = "is full: give it more room, or take away models that no pod uses any more"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                what = "may not be written by this user: on a node, mkdir it and chown it to 1000"
            else:
                what = f"cannot be used: {error}"
            raise FetchError(f"{folder.parent} {what}", field=CACHE) from error

    def _keep(self, uri: str, folder: Path, text_only: bool) -> None:
        whole = _beside(folder, "all")
        if text_only and not whole.is_dir():
            whole = _beside(folder, "text")
        if whole.is_dir():
            self._report(f"{folder} is there")
        else:
            partial = whole.with_name(f"{whole.name}.partial")  # may hold files of an earlier try
            partial.mkdir(exist_ok=True)
            self._fill(uri, text_only, partial)
            _sync(partial)
            partial.rename(whole)
        _lead(folder, whole)

    def _fill(self, uri: str, text_only: bool, folder: Path) -> None:
        name = uri.rstrip("/").rpartition("/")[2]
        if not name.endswith(ARCHIVES):
            source = self._source(uri)
            self._fetch_all(source, wanted_files(source, text_only), folder)
            return
        source = self._source(uri.rstrip("/").removesuffix(name))
        wanted = WantedFile(name, sha256=read_sums(source).get(name))
        self._fetch_all(source, Wanted((wanted,)), folder)
        self._report(f"{name}: unpacking")
        unpack(folder / name, folder, text_only)
        (folder / name).unlink()

    def _source(self, uri: str) -> Source:
        parts = urlsplit(uri)
        if parts.scheme == "s3":
            return S3Source(parts.netloc, parts.path)
        return WebSource(uri, self._environment.get("BEARER_TOKEN"))

    def _fetch_all(self, source: Source, wanted: Wanted, folder: Path) -> None:
        download = Download(source, folder, self._report, wanted.weights_bytes, self._pause_s)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            under_way = [threads.submit(download.fetch, file) for file in wanted.files]
            try:
                for each in concurrent.futures.as_completed(under_way):
                    each.result()
            except BaseException:
                download.is_over.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
