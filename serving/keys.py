"""API keys: who may call what. The file holds hashes only; keys are compared in constant time. Loads without torch."""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

from fastapi import Request

from serving.errors import AuthError, RequestError
from training.errors import ConfigError

log = logging.getLogger(__name__)

KEY_PREFIX = "pt-"


class Role(StrEnum):
    """What a key may do."""

    ADMIN = "admin"  # everything
    USER = "user"  # generate, and see what answers


class ForbiddenError(RequestError):
    """A key that is known and may not do this."""

    status_code = 403


USER_ROUTES = {
    ("GET", "/docs"),
    ("GET", "/docs/assets/swagger-ui-bundle.js"),
    ("GET", "/docs/assets/swagger-ui.css"),
    ("GET", "/docs/assets/favicon.png"),
    ("GET", "/openapi.json"),
    ("POST", "/generate"),
    ("GET", "/deployment"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
}
"""All others are for admins only."""


@dataclass(frozen=True)
class StoredKey:
    role: Role
    digest: str
    """SHA-256 of the key, in hex. Keys are random and long, so that a slow hash would add nothing."""


class KeyRing:
    """The keys of one file, as it is now: a key that is taken away must not open anything any more."""

    def __init__(self, keys: Sequence[StoredKey], path: Path | None = None, seen: tuple[int, ...] | None = None):
        self._keys = list(keys)
        self._path = path
        self._seen = seen

    @classmethod
    def read(cls, path: Path) -> "KeyRing":
        """Reads lines `role:sha256`; empty ones and those that start with # are skipped.

        Raises:
            ConfigError: the file cannot be read, holds no key, or a line is not of the form.
        """
        seen = _version(path)  # before the keys: what changes meanwhile is read again
        keys = _keys_in(path)
        if not keys:
            raise ConfigError(f"{path} holds no API key", hint="polythink keys add makes one.", field="api_keys_file")
        return cls(keys, path, seen)

    def _refresh(self) -> None:
        """Reads a file that has changed again; one that is faulty or gone by now changes nothing."""
        version = _version(self._path)
        if self._path is None or version is None or version == self._seen:
            return
        self._seen = version
        try:
            self._keys = _keys_in(self._path)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)

    def role_of(self, key: str) -> Role | None:
        """The role of `key`, or None when it is unknown. Takes the same time whichever key matches."""
        self._refresh()
        digest = key_digest(key)
        role = None
        for stored in self._keys:
            if hmac.compare_digest(stored.digest, digest):
                role = stored.role
        return role

    async def authenticate(self, request: Request) -> None:
        """
        Raises:
            AuthError: no bearer token, or an unknown one.
            ForbiddenError: the route needs another role.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        role = self.role_of(key.strip()) if scheme.lower() == "bearer" else None
        if role is None:
            raise AuthError("no valid API key", hint="Send the header Authorization: Bearer KEY.")
        if role is not Role.ADMIN and (request.method, request.url.path) not in USER_ROUTES:
            raise ForbiddenError(f"{request.method} {request.url.path} needs an {Role.ADMIN} key; this one is {role}")


def _version(path: Path | None) -> tuple[int, ...] | None:
    """What changes when the file at `path` does; None when there is none."""
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None


def _keys_in(path: Path) -> list[StoredKey]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}", field="api_keys_file") from None
    return [
        _parse(line.strip(), f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def add_key(path: Path, role: Role) -> str:
    """Makes a key, appends its hash to the file at `path`, and returns the key, which is stored nowhere."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    text = path.read_text(encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * (text != "" and not text.endswith("\n")) + f"{role}:{key_digest(key)}\n")
    return key


def require_keys(host: str, keys_file: Path | None) -> None:
    """
    Raises:
        ConfigError: the service would listen beyond this machine without keys.
    """
    if keys_file is None and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs API keys",
            hint="polythink keys add makes one; POLYTHINK_API_KEYS_FILE names the file.",
            field="api_keys_file",
        )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse(line: str, where: str) -> StoredKey:
    role, _, digest = line.partition(":")
    if role not in list(Role) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ConfigError(
            f"{where}: not of the form role:sha256", hint="Roles are admin and user.", field="api_keys_file"
        )
    return StoredKey(Role(role), digest)
