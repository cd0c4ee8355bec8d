"""LongBench's records: a JSON line each, in a folder, in `data.zip`, or from the hub where that is asked for."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import ConfigError, did_you_mean

__all__ = ["HUB", "Record", "RecordFile"]

HUB = "hub"
_REPOSITORY, _ARCHIVE = "THUDM/LongBench", "data.zip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record. `where` names its file and line; `length` counts words, or characters of a Chinese text."""

    record_id: str
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    length: int | None
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """One file of records, by name, in `data`: a folder, a zip archive, or "hub"."""

    data: str
    file_name: str

    def check(self) -> None:
        """Refuse a file that is not there; of the hub nothing is asked.

        Raises:
            ConfigError: there is no such folder, archive or file in it.
        """
        if self.data != HUB:
            _locate(Path(self.data).expanduser(), self.file_name)

    def content(self) -> bytes:
        """The file's bytes.

        Raises:
            ConfigError: the file is not there, or the hub cannot be reached.
        """
        path, member = _locate(_downloaded() if self.data == HUB else Path(self.data).expanduser(), self.file_name)
        if member is None:
            return path.read_bytes()
        with _opened(path) as archive:
            return archive.read(member)

    def sha256(self) -> str:
        """Digest of the file."""
        return hashlib.sha256(self.content()).hexdigest()

    def records(self) -> list[Record]:
        """Every record, in the order of the file.

        Raises:
            ConfigError: the file is not there or empty, or a line of it is not a record; names the line.
        """
        where = f"{self.data}: {self.file_name}"
        # A line ends at a line feed only: texts may hold other characters that Python takes for line ends.
        lines = enumerate(self.content().split(b"\n"), start=1)
        found = [_record(line, f"{where}, line {number}", number) for number, line in lines if line.strip()]
        if not found:
            raise ConfigError(f"{where} holds no records. Fetch the file again.")
        return found


def _locate(place: Path, file_name: str) -> tuple[Path, str | None]:
    """The file, or the archive and its member."""
    if place.is_dir():
        found = [path for path in (place / file_name, place / "data" / file_name) if path.is_file()]
        if found:
            return found[0], None
        raise _absent(place, file_name, (path.name for path in place.glob("*.jsonl")))
    if not place.is_file():
        raise ConfigError(
            f"There is no folder or archive {str(place)!r}. Give `data` LongBench's {_ARCHIVE} or the folder it "
            f'unpacks to; where the hub can be reached, "{HUB}" fetches it.'
        )
    if not zipfile.is_zipfile(place):
        raise ConfigError(f"{str(place)!r} is no zip archive. Give `data` a folder of .jsonl files or {_ARCHIVE}.")
    with _opened(place) as archive:
        names = [name for name in archive.namelist() if not name.startswith("__MACOSX")]
    members = [name for name in names if PurePosixPath(name).name == file_name]
    if not members:
        raise _absent(place, file_name, (PurePosixPath(name).name for name in names if name.endswith(".jsonl")))
    return place, members[0]


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """An archive to read from.

    Raises:
        ConfigError: it is damaged, encrypted, or packed in a way that Python does not read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ConfigError(f"The archive {path} cannot be read: {error}. Fetch it again.") from error


def _absent(place: Path, file_name: str, names: Iterable[str]) -> ConfigError:
    found = sorted(names)
    return ConfigError(
        f"{str(place)!r} holds no {file_name}; it holds {', '.join(found) or 'no .jsonl file'}. LongBench's {_ARCHIVE} "
        f"has a file for every task.{did_you_mean(file_name, found)}"
    )


def _downloaded() -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(_REPOSITORY, _ARCHIVE, repo_type="dataset"))
    except (OSError, ValueError) as error:  # what the hub's client raises for no network, no file, no permission
        raise ConfigError(
            f"{_ARCHIVE} of the data set {_REPOSITORY} cannot be fetched: {str(error).strip().splitlines()[0]} "
            "Fetch it where the hub can be reached, and give `data` its path."
        ) from error


def _record(line: bytes, where: str, number: int) -> Record:
    try:
        values = json.loads(line.decode("utf-8-sig"))
        json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON in UTF-8: {error}. Fetch the file again.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds no record but {type(values).__name__}. Fetch the file again.")
    answers = _texts(values, "answers", where)
    if not any(answers):
        raise ConfigError(f"{where} has no answer, so nothing can be right. Correct or remove the record.")
    context = _text(values, "context", where)
    if not context:
        raise ConfigError(f"{where} has an empty context. Correct or remove the record.")
    length = values.get("length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise ConfigError(f"{where} has the length {length!r}, which is no whole number. Correct it.")
    return Record(
        record_id=str(values.get("_id", number)),
        context=context,
        question=_text(values, "input", where),
        answers=answers,
        classes=_texts(values, "all_classes", where) if values.get("all_classes") is not None else (),
        length=length,
        where=where,
    )


def _text(values: dict[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{where} has no text under {key!r} but {value!r}. Correct the record.")
    return value


def _texts(values: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where} has no list of texts under {key!r} but {value!r}. Correct the record.")
    return tuple(value)
