"""Atomic files: written beside their target and renamed, so that a kill or a full disk leaves the previous version.

Tensors are stored as safetensors: nothing executable is ever loaded. A reader opens regular files only, and compares
their length with their own header before it reads the rest.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn

from sparring.core.errors import UserError, first_line, one_line
from sparring.core.memory_usage import machine_bytes

AnyPath = str | os.PathLike[str]
_ABOUT = "sparring"  # the metadata of a safetensors file: the hash of its content, a space, a JSON value

JSON_BYTES = 64 * 2**20  # the longest JSON file, and the longest header of a safetensors file, that is read
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def write(path: Path, write_to: Callable[[Path], object], advice: str = "earlier files are untouched") -> None:
    """Write a file beside its target, flush it to disk, then rename it: readers see the old file or the new one.

    The name beside it is random and new, so several processes can write the same file, and no link is followed.
    """
    beside = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = _create(beside)
        write_to(beside)
        with open(beside, "rb+") as file:
            if hasattr(os, "fchmod"):  # not on Windows
                os.fchmod(file.fileno(), mode)  # safetensors makes a file that others cannot read
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:  # an interrupt must not leave a partial file either
        try:
            beside.unlink(missing_ok=True)
        except KeyboardInterrupt:  # polars raised it, and now Python does for the same Ctrl-C
            beside.unlink(missing_ok=True)
        except OSError:  # the folder itself is broken: reported below
            pass
        if not isinstance(error, (OSError, safetensors.SafetensorError, pl.exceptions.PolarsError)):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise UserError(f"cannot write {path}: {reason}; {advice}") from error


def _beside(path: Path) -> Path:
    """A new name for a temporary file, which nobody can foresee."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _create(path: Path) -> int:
    """Create an empty file, which must not exist, not even as a link; the mode that the umask gives it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)


def link(path: Path, to: Path) -> None:
    """Make `to` a second name of a file; readers of `to` see the old file or this one."""
    beside = _beside(to)
    os.link(path, beside)
    os.replace(beside, to)
    beside.unlink(missing_ok=True)  # os.replace leaves it if both are links of one file, as after a kill


def sweep(folder: Path) -> None:
    """Delete the temporary files of killed writers; only the holder of the folder's lock may do so."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


# Folders from elsewhere


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds a link out of it, a device, a FIFO or a socket, at any depth.

    To open one would read a file of somebody else, or wait forever.
    """
    root = folder.resolve()
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *names)):
            try:
                mode = path.stat().st_mode
                inside = not path.is_symlink() or path.resolve().is_relative_to(root)
            except (FileNotFoundError, PermissionError):  # a dangling link, or deleted since: reading it says so
                continue
            except (OSError, RuntimeError) as error:  # a loop of links
                raise UserError(f"cannot read {path}: {first_line(error)}") from error
            if not inside:
                raise UserError(f"{path} is a link that leads out of {folder}: put the file itself there")
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise UserError(f"{path} is not a regular file, so {folder} is not opened: delete it")


def inside(folder: Path, name: object) -> Path:
    """The path of a file of a folder, by a name that another file of it gives: a plain name, without a path."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise UserError(f"{folder} is corrupt: it names a file {str(name)[:80]!r}, which is not a plain name")
    return folder / name


def _check_regular(path: Path) -> None:
    """Raise unless a path leads to a regular file: a FIFO or a device could be read forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def _unreadable(path: Path, error: BaseException, advice: str) -> UserError:
    """The error of a file that cannot be opened, or whose content is wrong."""
    if isinstance(error, PermissionError):  # polars and safetensors leave strerror out
        return UserError(f"cannot read {path}: {os.strerror(errno.EACCES)}")
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"cannot read {path}: {error.strerror}")
    return UserError(f"{path} is corrupt: {first_line(error)}; {advice}")


def write_text(path: Path, text: str) -> None:
    write(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path, advice: str = "restore it from a copy") -> dict[str, Any]:
    """The object in a JSON file. A file that is missing or not JSON is an error, with advice."""
    value = read_json_value(path, advice)
    if not isinstance(value, dict):
        raise UserError(f"{path} is corrupt: it holds no JSON object; {advice}")
    return value


def read_json_value(path: Path, advice: str = "restore it from a copy") -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(read_text(path, advice))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise _unreadable(path, error, advice) from error


def read_text(path: Path, advice: str = "restore it from a copy") -> str:
    """The text of a file that holds JSON, so a short one."""
    try:
        _check_regular(path)
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, more than the {JSON_BYTES:,} of any such file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}; {advice}") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, advice) from error


def write_array(path: Path, array: np.ndarray, advice: str = "earlier files are untouched") -> None:
    """Write a .npy file."""

    def save(beside: Path) -> None:
        with open(beside, "wb") as file:  # numpy.save adds .npy to a name without it
            np.save(file, array, allow_pickle=False)

    write(path, save, advice)


def read_array(path: Path, *dtypes: npt.DTypeLike, advice: str = "restore it from a copy") -> np.ndarray:
    """The array of a .npy file, of one of these types, as a memory map: copy on write, as torch wants it."""
    try:
        _check_regular(path)
        array: Any = np.load(path, mmap_mode="c", allow_pickle=False)
        if isinstance(array, np.memmap) and path.stat().st_size != array.offset + array.nbytes:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, and its header describes {array.nbytes:,}")
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}; {advice}") from error
    except Exception as error:  # numpy parses the header as a Python literal, which fails in many ways
        raise _unreadable(path, error, advice) from error
    if not isinstance(array, np.ndarray) or array.dtype not in dtypes:
        held = f"{array.dtype} numbers" if isinstance(array, np.ndarray) else "several arrays"
        raise UserError(f"{path} is corrupt: it holds {held}, not {np.dtype(dtypes[0])}; {advice}")
    return array


def write_table(table: pl.DataFrame, path: AnyPath) -> None:
    """Write a Parquet file."""
    write(Path(path), table.write_parquet)


def read_table(path: AnyPath) -> pl.DataFrame:
    """The table in a Parquet file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        scan = pl.scan_parquet(path, glob=False)
        rows, width = scan.select(pl.len()).collect().item(), len(scan.collect_schema())
        if not 0 <= rows * width * 8 <= machine_bytes():
            raise ValueError(f"it promises {rows:,} rows, more than fit into memory")
        return scan.collect()
    except (OSError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        if isinstance(error, PermissionError):
            raise _unreadable(path, error, "") from error
        raise UserError(f"{path} is not a readable Parquet file: {first_line(error)}") from error


def write_tensors(path: AnyPath, tensors: Mapping[str, Tensor], meta: Mapping[str, object] | None = None) -> None:
    """Write tensors and a JSON value to one file, so that they can never disagree, with a hash of both."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    value = json.dumps(meta or {})
    about = {_ABOUT: f"{_tensors_hash(plain, value)} {value}"}
    write(Path(path), lambda file: safetensors.torch.save_file(plain, file, about))


def write_tensor_blocks(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    blocks: Mapping[str, Iterable[Tensor]],
    meta: Mapping[str, object] | None = None,
) -> str:
    """As write_tensors, for tensors that arrive as blocks of rows, of which one is in memory; the hash in the file."""
    value, blank = json.dumps(meta or {}), "0" * 32
    header: dict[str, Any] = {"__metadata__": {_ABOUT: f"{blank} {value}"}}
    offset, digest = 0, ""
    shapes = {name: shapes[name] for name in sorted(shapes, key=lambda name: -shapes[name][0].itemsize)}  # aligned
    for name, (kind, shape) in shapes.items():
        size = math.prod(shape) * kind.itemsize
        header[name] = {"dtype": KINDS[kind], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header)
    text += " " * (-len(text.encode()) % 8)

    def write_to(file: Path) -> None:
        nonlocal digest
        described = {}
        with open(file, "wb") as out:
            out.write(len(text.encode()).to_bytes(8, "little") + text.encode())
            for name, (kind, shape) in shapes.items():
                own = xxhash.xxh3_128()
                for block in blocks[name]:
                    data = _bytes_of(block.detach().contiguous().cpu())
                    own.update(data)
                    out.write(data)
                described[name] = str(kind), tuple(shape), own.hexdigest()
            digest = _combined(described, value)
            out.seek(8)
            out.write(text.replace(blank, digest, 1).encode())

    write(path, write_to)
    return digest


KINDS = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def read_tensors(path: Path, digest: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the JSON value written with them; one read, so both belong to the same version of the file.

    A file that differs from the written one is an error. `digest` is the XXH3-128 of the file, where it is known; the
    hash inside the file is checked otherwise.
    """
    with _reading(path):
        if path.stat().st_size > machine_bytes():
            raise ValueError(f"its {path.stat().st_size:,} bytes do not fit into memory")
        content = path.read_bytes()
        if digest is not None and xxhash.xxh3_128_hexdigest(content) != digest:
            raise ValueError("its hash does not match")
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return tensors, _checked(tensors, header.get("__metadata__"), digest is None)


def map_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As read_tensors, through a memory map: the check reads the file once, and its pages may be reclaimed after it."""
    with _reading(path), safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, _checked(tensors, file.metadata())


def tensors_hash(path: Path) -> str:
    """The hash in a file of tensors, after comparing it with their content."""
    with _reading(path), safetensors.safe_open(path, "pt") as file:
        _checked({name: file.get_tensor(name) for name in file.keys()}, file.metadata())  # noqa: SIM118
        return _hash_and_value(file.metadata())[0]


def read_state(path: Path) -> dict[str, Any]:
    """The JSON value in a file of tensors, which are neither read nor checked."""
    with _reading(path), safetensors.safe_open(path, "pt") as file:
        return _object(_hash_and_value(file.metadata())[1])


def _checked(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None, check: bool = True) -> dict[str, Any]:
    """The JSON value in the metadata, if the hash beside it is that of value and tensors."""
    digest, value = _hash_and_value(about)
    if check and _tensors_hash(tensors, value) != digest:
        raise ValueError("its hash does not match")
    return _object(value)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("its metadata is no JSON object")
    return value


def _hash_and_value(about: Mapping[str, str] | None) -> tuple[str, str]:
    """The two parts of the metadata; one entry, since safetensors writes several in a random order."""
    digest, _, value = (about or {}).get(_ABOUT, "").partition(" ")
    if len(digest) != 32 or not value:
        raise ValueError("it has no hash, so another version of Sparring wrote it")
    return digest, value


def _tensors_hash(tensors: Mapping[str, Tensor], value: str) -> str:
    described = {
        name: (str(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_128_hexdigest(_bytes_of(tensor)))
        for name, tensor in tensors.items()
    }
    return _combined(described, value)


def _combined(described: Mapping[str, tuple[str, tuple[int, ...], str]], value: str) -> str:
    """The hash of tensors, each given as type, shape and hash of its data, and of the JSON value."""
    return xxhash.xxh3_128_hexdigest(repr((sorted(described.items()), value)).encode())


def _bytes_of(tensor: Tensor) -> memoryview:
    """The data of a contiguous tensor; not by reshape, since the stride of a tensor of one number may be anything."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise UserError(f"{path} is missing: {path.parent} is not a finished run (or not a run folder)")
    try:
        _check_length(path)
        yield
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable(path, error, "train again, or restore it from a copy") from error


def _check_length(path: Path) -> None:
    """Raise unless a safetensors file has the length that its header promises: no more is ever read."""
    with open(path, "rb") as file:
        size, head = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if not 0 < head <= min(JSON_BYTES, size - 8):
            raise ValueError("it has no header of tensors")
        header = json.loads(file.read(head))
    try:
        end = max((about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"), default=0)
        if 8 + head + end != size:
            raise ValueError(f"it has {size:,} bytes, and its header describes {8 + head + end:,}")
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError("its header describes no tensors") from error


def read_section(path: AnyPath, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors called "name.*", without that prefix, and the JSON value under the key `name`."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    kinds = OSError, ValueError, RecursionError, safetensors.SafetensorError
    with one_line(f"{path} is not a readable safetensors file", *kinds):
        _check_length(path)
        with safetensors.safe_open(path, "pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            meta = _checked(found, file.metadata())
    tensors = {key: tensor for key, tensor in found.items() if key.startswith(f"{name}.")}
    if not tensors or not isinstance(meta.get(name), dict):
        raise UserError(f"{path} holds no {name}: give a file that `sparring cluster` wrote")
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}, meta[name]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module by name, each shared tensor once."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors into a module in place; a difference in names or shapes is an error that names the file."""
    state = tensors_of(module)
    for name in sorted(state.keys() ^ tensors.keys()):
        problem = "missing" if name in state else "not expected"
        raise UserError(f"{path} does not fit this run: tensor {name!r} is {problem}")
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)} in the file, {tuple(tensor.shape)} in the run"
                raise UserError(f"{path} does not fit this run: {name!r} is {shapes}")
            tensor.copy_(tensors[name])
