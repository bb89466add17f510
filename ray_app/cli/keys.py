"""`polythink keys …`: API keys. Their file holds lines `role:sha256`, beside comments and blank lines of its owner's."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ray_app.cli.console import console, errors
from training.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="API keys.")

FINGERPRINT_LENGTH = 12
"""Hex digits of a key's SHA-256 that stand for it: enough to tell any number of keys apart."""


@app.command()
def add(role: Annotated[str, typer.Argument(help="admin (everything) or user (generate).")]) -> None:
    """Make an API key. It is shown once; only its hash is kept."""
    from ray_app.cluster.parts import keys_path
    from serving.keys import Role, add_key, key_digest

    if role not in list(Role):
        raise ConfigError(f"there is no role {role!r}", hint=f"Roles: {', '.join(Role)}.", field="role")
    key = add_key(keys_path(), Role(role))
    _tell(f"Added to {keys_path()} with the fingerprint {_fingerprint(key_digest(key))}.")
    _tell("Send it as `Authorization: Bearer KEY`, or set POLYTHINK_API_KEY.")
    print(key)


@app.command("list")
def list_keys() -> None:
    """Fingerprint and role of every key, never the key itself."""
    from ray_app.cluster.parts import keys_path

    stored = [key for key in map(_stored, _lines(keys_path())) if key]
    for role, digest in stored:
        console.print(f"{_fingerprint(digest)}  {role}")
    if not stored:
        _tell(f"There are no API keys in {keys_path()}. `polythink keys add admin` makes one.")


@app.command()
def remove(fingerprint: Annotated[str, typer.Argument(help="As `keys list` shows it.")]) -> None:
    """Take a key away."""
    from ray_app.cluster.parts import keys_path

    lines = _lines(keys_path())
    kept = [line for line in lines if not _is_of(line, fingerprint)]
    if len(kept) == len(lines):
        raise ConfigError(
            f"no key in {keys_path()} has the fingerprint {fingerprint!r}",
            hint="`polythink keys list` shows them.",
            field="fingerprint",
        )
    _replace(keys_path(), "".join(kept))
    console.print(f"Removed {fingerprint}.")


def _lines(path: Path) -> list[str]:
    """The lines of the file with their ends; [] when there is none.

    Raises:
        ConfigError: a line is faulty.
    """
    from serving.keys import KeyRing

    if not path.exists():
        return []
    lines = path.read_bytes().decode("utf-8", "surrogateescape").splitlines(keepends=True)
    if any(map(_stored, lines)):
        KeyRing.read(path)
    return lines


def _stored(line: str) -> tuple[str, str] | None:
    """Role and hash; None for a comment or a blank line."""
    role, _, digest = line.strip().partition(":")
    return (role, digest) if role and not role.startswith("#") else None


def _is_of(line: str, fingerprint: str) -> bool:
    stored = _stored(line)
    return stored is not None and len(fingerprint) >= FINGERPRINT_LENGTH and stored[1].startswith(fingerprint)


def _fingerprint(digest: str) -> str:
    return digest[:FINGERPRINT_LENGTH]


def _replace(path: Path, text: str) -> None:
    """Puts `text` in the file's place, whole or not at all, under its owner and rights."""
    path = path.resolve()  # of a link, what it leads to is replaced
    before = path.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        os.chown(name, before.st_uid, before.st_gid)
        os.chmod(name, stat.S_IMODE(before.st_mode))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _tell(text: str) -> None:
    """On standard error: standard output holds keys alone."""
    errors.print(f"[dim]{text}[/]", soft_wrap=True)
