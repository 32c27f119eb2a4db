"""Keys: their files, and signatures that verify only what was signed."""

import hashlib

import pytest

from protocol.errors import LocalFault, PeerFault
from protocol.identity import Identity, key_id, verify


def test_an_id_is_the_hash_of_the_key(identity):
    assert identity.id == hashlib.sha256(identity.public_key).hexdigest() == key_id(identity.public_key)
    assert identity.id[:16] in repr(identity)


def test_signatures_verify_only_with_their_key_and_message(identity):
    signature = identity.sign(b"message")
    verify(identity.public_key, b"message", signature)
    for key, message, bad in [
        (identity.public_key, b"other", signature), (Identity(bytes(32)).public_key, b"message", signature),
        (identity.public_key, b"message", signature[:-1]), (identity.public_key, b"message", bytes(64)),
        (identity.public_key[:-1], b"message", signature), (bytes(32), b"message", bytes(64)),
        (b"\x01" + bytes(31), b"message", b"\x01" + bytes(63)),
    ]:
        with pytest.raises(PeerFault, match="E_SIGNATURE"):
            verify(key, message, bad)


def test_a_signature_cannot_be_reshaped(identity):
    """S + L is the same number modulo the group order; RFC 8032 wants the small one."""
    signature = identity.sign(b"message")
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(PeerFault, match="E_SIGNATURE"):
        verify(identity.public_key, b"message", signature[:32] + s.to_bytes(32, "little"))


def test_key_files_come_back_and_are_private(tmp_path, identity):
    path = tmp_path / "keys" / "node.key"
    identity.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load(path).id == identity.id
    with pytest.raises(LocalFault, match="E_KEY_FILE"):
        identity.save(path)
    path.chmod(0o640)
    with pytest.raises(LocalFault, match="chmod 600"):
        Identity.load(path)


@pytest.mark.parametrize("content", [b"", b"00" * 31, b"zz" * 32, b"\xff\xfe", b"00" * 33])
def test_malformed_key_files_are_refused(tmp_path, content):
    path = tmp_path / "bad.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(LocalFault, match="E_KEY_FILE"):
        Identity.load(path)


def test_missing_key_files(tmp_path):
    path = tmp_path / "new.key"
    with pytest.raises(LocalFault, match="E_KEY_FILE"):
        Identity.load(path)
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).id == made.id
