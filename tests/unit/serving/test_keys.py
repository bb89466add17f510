"""API keys: who may call what."""

import hashlib
import stat

import httpx
import pytest
from fastapi import FastAPI

from serving.keys import KeyRing, Role, add_key, key_digest, require_keys
from serving.middleware import KeyCheck
from training.errors import ConfigError


def test_a_key_is_stored_as_its_hash_only(tmp_path):
    path = tmp_path / "etc" / "keys"
    admin, user = add_key(path, Role.ADMIN), add_key(path, Role.USER)
    text = path.read_text()
    assert text.splitlines() == [f"admin:{hashlib.sha256(admin.encode()).hexdigest()}", f"user:{key_digest(user)}"]
    assert admin not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ring = KeyRing.read(path)
    assert (ring.role_of(admin), ring.role_of(user)) == (Role.ADMIN, Role.USER)
    assert ring.role_of(admin + "x") is None
    assert ring.role_of("") is None


def test_a_key_goes_on_a_line_of_its_own(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\nadmin:{key_digest('a')}")  # an editor left no newline at the end
    user = add_key(path, Role.USER)
    assert KeyRing.read(path).role_of(user) is Role.USER


def test_a_running_service_knows_what_the_file_holds_now(tmp_path, caplog):
    path = tmp_path / "keys"
    first = add_key(path, Role.ADMIN)
    ring = KeyRing.read(path)
    second = add_key(path, Role.USER)
    assert (ring.role_of(first), ring.role_of(second)) == (Role.ADMIN, Role.USER)
    path.write_text(f"user:{key_digest(second)}\n")
    assert (ring.role_of(first), ring.role_of(second)) == (None, Role.USER)
    path.write_text("user:123\n")  # an editor's half-written file
    assert ring.role_of(second) is Role.USER
    assert "line 1" in caplog.text
    path.unlink()
    assert ring.role_of(second) is Role.USER
    path.write_text("# nobody is left\n")
    assert ring.role_of(second) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no API key"),
        ("# nothing\n", "no API key"),
        ("admin:1234\n", "line 1"),
        (f"root:{'0' * 64}\n", "line 1"),
        (f"admin:{'0' * 64}\nuser {'0' * 64}\n", "line 2"),
        (f"admin:{'G' * 64}\n", "line 1"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path, text, says):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        KeyRing.read(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        KeyRing.read(tmp_path / "none")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_beyond_loopback_keys_are_required(host, tmp_path):
    with pytest.raises(ConfigError, match="API keys"):
        require_keys(host, None)
    require_keys(host, tmp_path / "keys")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_on_loopback_they_are_not(host):
    require_keys(host, None)


async def test_roles(tmp_path):
    path = tmp_path / "keys"
    keys = {"admin": add_key(path, Role.ADMIN), "user": add_key(path, Role.USER), "wrong": "pt-wrong"}
    app = FastAPI()
    app.add_middleware(KeyCheck, authenticate=KeyRing.read(path).authenticate)
    for method, route in (("POST", "/generate"), ("GET", "/deployment"), ("PUT", "/deployment"), ("POST", "/jobs")):
        app.add_api_route(route, lambda: "done", methods=[method])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:

        async def status(method: str, path: str, authorization: str | None) -> int:
            headers = {"Authorization": authorization} if authorization else {}
            return (await client.request(method, path, headers=headers)).status_code

        for method, route, for_user in (
            ("POST", "/generate", 200),
            ("GET", "/deployment", 200),
            ("PUT", "/deployment", 403),
            ("POST", "/jobs", 403),
            ("GET", "/openapi.json", 200),
        ):
            assert await status(method, route, f"Bearer {keys['admin']}") == 200
            assert await status(method, route, f"bearer {keys['user']}") == for_user
            assert await status(method, route, f"Bearer {keys['wrong']}") == 401
            assert await status(method, route, f"Basic {keys['admin']}") == 401
            assert await status(method, route, keys["admin"]) == 401
            assert await status(method, route, "Bearer ") == 401
            assert await status(method, route, None) == 401
        refused = await client.post("/generate")
        assert refused.headers["www-authenticate"] == "Bearer"
