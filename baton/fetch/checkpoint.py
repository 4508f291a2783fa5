"""A whole checkpoint, or its text, from a URI into a folder."""

from __future__ import annotations

import concurrent.futures
import errno
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from baton.fetch import archive, node_cache
from baton.fetch.checkpoint_files import Wanted, WantedFile, read_sums, wanted_files
from baton.fetch.download import Download, Progress, Tell
from baton.fetch.errors import CACHE, FetchError
from baton.fetch.s3 import S3Source
from baton.fetch.source import Source
from baton.fetch.web import WebSource

_AT_ONCE = 4
"""Files that come at the same time: one connection seldom fills a link."""


class Fetcher:
    """`environment`: its BEARER_TOKEN is for https; boto3 reads its own. `pause_s`: before the next
    try of a file of which nothing came; doubled each time."""

    def __init__(self, environment: Mapping[str, str], tell: Tell, pause_s: float = 1.0) -> None:
        self._environment, self._tell, self._pause_s = environment, tell, pause_s

    def fetch(self, uri: str, folder: Path, text_only: bool) -> None:
        """Have the checkpoint of `uri` in `folder`; `text_only`: no weights. Raises FetchError."""
        try:
            node_cache.keep(folder, text_only, partial(self._fill, uri, text_only), self._tell)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what = "is full: give it more room, or take away models that no pod uses any more"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                what = "may not be written by this user: on a node, mkdir it and chown it to 1000"
            else:
                what = f"cannot be used: {error}"
            raise FetchError(f"{folder.parent} {what}", field=CACHE) from error

    def _fill(self, uri: str, text_only: bool, folder: Path) -> None:
        name = uri.rstrip("/").rpartition("/")[2]
        if not name.endswith(archive.SUFFIXES):
            source = self._source(uri)
            self._fetch_all(source, wanted_files(source, text_only), folder)
            return
        source = self._source(uri.rstrip("/").removesuffix(name))
        wanted = WantedFile(name, sha256=read_sums(source).get(name))
        self._fetch_all(source, Wanted((wanted,)), folder)
        self._tell(f"{name}: unpacking")
        archive.unpack(folder / name, folder, text_only)
        (folder / name).unlink()

    def _source(self, uri: str) -> Source:
        parts = urlsplit(uri)
        if parts.scheme == "s3":
            return S3Source(parts.netloc, parts.path)
        return WebSource(uri, self._environment.get("BEARER_TOKEN"))

    def _fetch_all(self, source: Source, wanted: Wanted, folder: Path) -> None:
        progress = Progress(self._tell, wanted.weights_bytes)
        download = Download(source, folder, progress, self._pause_s)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            under_way = [threads.submit(download.fetch, file) for file in wanted.files]
            try:
                for each in concurrent.futures.as_completed(under_way):
                    each.result()
            except BaseException:
                progress.is_over.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
