"""Fetch files once: atomic, checked, with a record of what was fetched."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from sparring.core.errors import UserError

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all where the server says

_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Where downloads live: $SPARRING_HOME, else ~/.cache/sparring."""
    return Path(os.environ.get("SPARRING_HOME") or Path.home() / ".cache" / "sparring")


def fetch(
    url: str, target: Path, md5: str | None = None, progress: Progress | None = None, timeout: float = 30
) -> Path:
    """Download a URL to a file, unless it is there already; its sha256 is written beside it.

    The file appears only when complete and, where an md5 is known, only when it matches.
    """
    if target.is_file():
        return target
    partial = target.with_name(target.name + ".part")
    sha256, wanted, done = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=timeout) as answer, open(partial, "wb") as file:
            length = answer.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                sha256.update(chunk)
                wanted.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
        if total is not None and done != total:
            raise UserError(f"{url} broke off after {done:,} of {total:,} bytes; try again")
        if md5 is not None and wanted.hexdigest() != md5:
            raise UserError(
                f"{url} has the md5 {wanted.hexdigest()}, expected {md5}: the file is damaged or was replaced; try again"
            )
        target.with_name(target.name + ".sha256").write_text(f"{sha256.hexdigest()}  {target.name}\n")
        os.replace(partial, target)
    except (urllib.error.URLError, HTTPException, OSError) as error:
        reason = (
            f"HTTP {error.code}"
            if isinstance(error, urllib.error.HTTPError)
            else getattr(error, "reason", None) or error
        )
        raise UserError(f"cannot download {url}: {reason}; check the network, or put the file at {target}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return target


def unzip(archive: Path, folder: Path) -> Path:
    """Extract an archive into a folder that appears only when complete; nothing is written outside it."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as zipped:
            for member in zipped.infolist():
                inside = (partial / member.filename).resolve().is_relative_to(partial.resolve())
                if not inside or stat.S_ISLNK(member.external_attr >> 16):
                    raise UserError(f"{archive} holds the unsafe path {member.filename!r}; it was not extracted")
            zipped.extractall(partial)
        os.replace(partial, folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"cannot extract {archive}: {error}; delete it and download again") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
