"""How a run's manifest takes calibrations in: signed records become profiles with limits and null distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from protocol.calibration import CalibrationRecord, Profile
from protocol.envelope import Envelope
from protocol.errors import E_CONFIG, LocalFault, PeerFault


def calibrated(profiles: Sequence[Profile], files: Iterable[Path], layout_sha256: str) -> list[Profile]:
    """``profiles`` with those of the records in place of, or after, the ones of the same name.

    Who made a record is the operator's business, who signs the manifest; its signature only shows that it is whole.

    Raises:
        LocalFault: ``E_CONFIG`` for a file that cannot be read, is no record, or is about another model.
    """
    found = {profile.name: profile for profile in profiles}
    for file in files:
        profile = _read(file, layout_sha256)
        found[profile.name] = profile
    return list(found.values())


def read_record(file: Path) -> tuple[Envelope, CalibrationRecord]:
    """A record and its envelope, for whatever model it is.

    Raises:
        LocalFault: ``E_CONFIG`` for a file that cannot be read or is no record.
    """
    try:
        envelope = Envelope.from_bytes(file.read_bytes())
        claimed = CalibrationRecord.from_payload(envelope.payload)
        return envelope, CalibrationRecord.open(envelope, claimed.verifier_public_key)
    except (OSError, PeerFault) as error:
        raise LocalFault(
            E_CONFIG, f"cannot use the calibration {file}", expected="a record of `assay verifier calibrate`",
            got=str(error)[:200],
        ) from None


def _read(file: Path, layout_sha256: str) -> Profile:
    envelope, record = read_record(file)
    if record.layout_sha256 != layout_sha256:
        raise LocalFault(
            E_CONFIG, f"the calibration {file} is of another model", expected=layout_sha256, got=record.layout_sha256
        )
    if record.profile.calibration is None:
        return record.profile
    noted = record.profile.calibration.model_copy(update={"record_sha256": envelope.digest})
    return record.profile.model_copy(update={"calibration": noted})
