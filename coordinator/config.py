"""Configuration of ``assay coordinator serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from protocol.config import Config


class CoordinatorConfig(Config):
    """One coordinator process. What the run is stands in its signed manifest, not here."""

    directory: Path
    #: folder made by ``assay coordinator init``: keys, manifest, database, store
    database_url: str = ""
    #: SQLAlchemy URL; empty: ``coordinator.db`` in the directory
    store_url: str = ""
    #: object store (dir:PATH or s3://...); empty: ``store`` in the directory
    host: str = "127.0.0.1"
    #: address to listen on
    port: Annotated[int, Field(ge=0, le=65_535)] = 8700
    #: port to listen on; 0: any free one
    rate_per_s: Annotated[float, Field(ge=0)] = 200.0
    #: requests per second one address may make; 0: no limit
    rate_burst: Annotated[int, Field(ge=1)] = 400
    #: requests one address may make at once
    max_connections: Annotated[int, Field(ge=1)] = 512
    #: connections open at the same time; a further one takes the place of one that is idle
    max_connections_per_address: Annotated[int, Field(ge=1)] = 128
    #: of which one address may have so many; proxies (FORWARDED_ALLOW_IPS) may have all
    head_timeout_s: Annotated[float, Field(gt=0)] = 20.0
    #: longest time a client may take to begin, that is for the head of a request, in seconds
    download_bytes_per_s: Annotated[float, Field(gt=0)] = 4096.0
    #: slowest reader of an answer that is waited for
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    #: longest time a client may take to send a message, in seconds
    max_object_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    #: largest object a node may upload
    max_uploads: Annotated[int, Field(ge=1)] = 64
    #: uploads received at the same time, each on disk until it is whole; more are told to wait, or take the place of
    #: whoever holds most
    max_uploads_per_node: Annotated[int, Field(ge=1)] = 4
    #: of which one node may have so many (nodes send four side by side)
    upload_bytes_per_s: Annotated[float, Field(gt=0)] = 16_384.0
    #: slowest upload that is waited for, after body_timeout_s
    upload_ms: Annotated[int, Field(ge=1000)] = 300_000
    #: how long an upload address is valid
    batches_ahead: Annotated[int, Field(ge=1)] = 2
    #: batches of open or unconsumed groups kept at most (never more than max_lag_versions + 1): more keeps more nodes
    #: busy, fewer keeps rollouts fresher
    max_active_leases: Annotated[int, Field(ge=1)] = 64
    #: leases one node may hold; halved and so on while it keeps dropping them
    share_groups: bool = True
    #: deal the units of a group to several nodes, so that every node's samples are compared with those of peers; false:
    #: leases are handed out as they come
    claim_ms: Annotated[int, Field(ge=1000)] = 600_000
    #: time a verifier has for a bundle
    max_inconclusive: Annotated[int, Field(ge=1)] = 3
    #: inconclusive verdicts after which a bundle is set aside
    max_claims: Annotated[int, Field(ge=1)] = 8
    #: claims that ran out, or were followed by another, without a verdict, after which a bundle is set aside
    review_hold_ms: Annotated[int, Field(ge=0)] = 600_000
    #: how long a group waits at most for the review of one of its bundles; longer, and the learner gets it
    requeue_ms: Annotated[int, Field(ge=0)] = 2_000
    #: wait before an inconclusive bundle is handed out again; doubles each time
    max_clock_skew_ms: Annotated[int, Field(ge=0)] = 3_600_000
    #: how far the date of a node's or the learner's message may be from our clock
    sweep_s: Annotated[float, Field(gt=0)] = 1.0
    #: how often expired leases are collected
    status_ms: Annotated[int, Field(ge=0)] = 200
    #: how old the status may be that is shown to whoever asks for it: making it takes longer than most requests
    log_level: str = "INFO"
    #: DEBUG, INFO, WARNING or ERROR

    @property
    def longest_upload_ms(self) -> float:
        """Time from the grant of an upload to the latest end of it, in milliseconds."""
        return self.upload_ms + 1000 * (self.body_timeout_s + self.max_object_bytes / self.upload_bytes_per_s)

    @property
    def database(self) -> str:
        """URL of the database."""
        return self.database_url or f"sqlite:///{self.directory / 'coordinator.db'}"

    @property
    def store(self) -> str:
        """URL of the object store."""
        return self.store_url or f"dir:{self.directory / 'store'}"
