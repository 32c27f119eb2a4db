"""Configuration of ``assay verifier run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from protocol.config import Config


class VerifierConfig(Config):
    """One verifier process. Thresholds and rules stand in the run's signed manifest, not here."""

    coordinator: str
    #: the coordinator's address, for example http://127.0.0.1:8700
    key: Path
    #: file with the verifier's signing key; the run manifest must name its public key
    root: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    #: root public key of the run, hex; everything else is checked against it
    store: str | None = None
    #: the object store, read directly: dir:PATH or s3://BUCKET/PREFIX; without it objects come from the coordinator
    mirrors: tuple[str, ...] = ()
    #: more places to fetch weights from: http(s)://HOST/PATH, dir:PATH, s3://BUCKET/PREFIX; none of them is trusted
    work: Path = Path("verifier-work")
    #: folder for the model's files and fetched chunks; nothing in it needs a backup
    chunk_cache_mb: Annotated[int, Field(ge=16)] = 4096
    #: fetched chunks kept on disk, in MiB; the oldest go first
    device: str = "cpu"
    #: torch device of the recomputation
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    #: CPU threads of the recomputation
    kept_undos: Annotated[int, Field(ge=0, le=4096)] = 32
    #: versions that can be stepped back without rebuilding from an anchor
    poll_s: Annotated[float, Field(gt=0, le=600)] = 0.25
    #: how often to ask for work when there is none
    request_deadline_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    #: longest time for one request to the coordinator, retries included
    log_file: Path | None = None
    #: JSON lines go here instead of stderr
    log_level: str = "INFO"
    #: DEBUG, INFO, WARNING or ERROR
