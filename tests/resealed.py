"""Checkpoints that somebody else made, or edited: checksums need no key, so theirs are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemini.checkpoint.directory import MANIFEST, SEAL, encoded
from gemini.checkpoint.sealed_file import Seal


def read(file: Path) -> Any:
    """Return a document, or the header of a safetensors file."""
    if file.suffix == ".json":
        return json.loads(file.read_bytes())
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def write(file: Path, document: Any) -> None:
    """Write what :func:`read` returned, as changed."""
    if file.suffix == ".json":
        file.write_bytes(encoded(document))
        return
    content = file.read_bytes()
    values = content[8 + int.from_bytes(content[:8], "little") :]
    text = json.dumps(document).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    file.write_bytes(len(text).to_bytes(8, "little") + text + values)


def edit(checkpoint: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a document of a checkpoint and seal it again."""
    document = read(checkpoint / name)
    change(document)
    write(checkpoint / name, document)
    reseal(checkpoint)


def reseal(checkpoint: Path) -> None:
    """Give a checkpoint the checksums of what its files hold."""
    manifest = read(checkpoint / MANIFEST)
    if isinstance(manifest.get("files"), dict):
        held = [name for name in manifest["files"] if (checkpoint / name).is_file()]
        manifest["files"] |= {name: Seal.of((checkpoint / name).read_bytes()) for name in held}
    write(checkpoint / MANIFEST, manifest)
    said = {key: manifest[key] for key in ("sequence", "save") if key in manifest}
    write(checkpoint / SEAL, {**said, "manifest": Seal.of((checkpoint / MANIFEST).read_bytes())})
