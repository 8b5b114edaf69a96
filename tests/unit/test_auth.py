"""Keys: their form, what is refused before a database is asked, and how long one is remembered."""

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api.auth import demand
from runtime.api.schemas import Scope
from runtime.key_store import ALL_SCOPES, is_key_id, mint_key, parse_key


def test_a_minted_key_has_256_random_bits_and_parses() -> None:
    key = mint_key()
    prefix, key_id, secret = key.split("_")
    assert prefix == "noria"
    assert len(bytes.fromhex(secret)) == 32
    parsed = parse_key(key)
    assert parsed is not None
    assert parsed.id == key_id
    assert is_key_id(parsed.id)
    assert parsed.secret_hash == hashlib.sha256(secret.encode()).digest()
    assert secret not in repr(parsed), "the secret itself is not kept"
    assert mint_key() != key


@given(st.text(max_size=200))
def test_no_other_text_is_a_key(text: str) -> None:
    looks_like_one = re.fullmatch(r"noria_[0-9a-f]{16}_[0-9a-f]{64}", text, re.ASCII)
    assert (parse_key(text) is not None) == (looks_like_one is not None)


@pytest.mark.parametrize(
    "mangle",
    [
        lambda key: key[:-1],
        lambda key: key + "0",
        lambda key: key + "\n",
        lambda key: key.upper(),
        lambda key: key.replace("_", "-"),
        lambda key: key * 100,
        lambda key: "",
        lambda key: key[:-1] + "\u0661",
    ],
)
def test_a_mangled_key_is_no_key(mangle: object) -> None:
    assert callable(mangle)
    assert parse_key(mangle(mint_key())) is None


def test_the_scopes_are_the_same_words_everywhere() -> None:
    assert set(ALL_SCOPES) == {scope.value for scope in Scope}


def test_a_lacking_scope_is_named() -> None:
    from runtime.api.auth import Caller
    from runtime.api.problems import Refused
    from runtime.run import TenantId

    parsed = parse_key(mint_key())
    assert parsed is not None
    caller = Caller(TenantId("default"), parsed, "crm", frozenset({"runs:read"}))
    demand(caller, Scope.RUNS_READ)
    with pytest.raises(Refused, match="needs the scope runs:write; this key has: runs:read"):
        demand(caller, Scope.RUNS_WRITE)
