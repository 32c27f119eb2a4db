"""Configuration of ``assay node run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from protocol.config import Config
from protocol.swarm.announce import PeerAddress

#: Names of the drills; see ``node.drill``.
DrillName = Literal["best-of-n", "int8", "stale", "edited-answer"]


class NodeConfig(Config):
    """One node process. What the run is stands in its signed manifest, not here."""

    home: Path
    #: folder made by ``assay node join``: key, pinned run, weights, spool
    batch: Annotated[int, Field(ge=1, le=4096)] = 16
    #: rollouts generated at once
    prefetch: Annotated[float, Field(ge=0, le=4)] = 0.5
    #: work held in reserve, as a fraction of ``batch``; at least one lease
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    #: CPU threads of the engine
    drill: DrillName | None = None
    #: cheat on purpose in this way; only for keys the operator enrolled for it
    poll_s: Annotated[float, Field(gt=0, le=600)] = 1.0
    #: how often to ask for the newest checkpoint
    report_s: Annotated[float, Field(gt=0, le=600)] = 2.0
    #: how often status.json is written
    contact_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    #: how often the coordinator is asked what became of our work
    request_deadline_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    #: longest time for one request to the coordinator, retries included
    drain_timeout_s: Annotated[float, Field(ge=0)] = 60.0
    #: after SIGTERM: time to finish what is begun and to upload it
    save_s: Annotated[float, Field(gt=0)] = 120.0
    #: how often the weights are saved for a quick restart
    mirrors: tuple[str, ...] = ()
    #: more places to fetch weights from: http(s)://HOST/PATH, dir:PATH, s3://BUCKET/PREFIX; none of them is trusted
    chunk_cache_mb: Annotated[int, Field(ge=16)] = 4096
    #: fetched chunks kept on disk, in MiB; the oldest go first
    swarm: bool = False
    #: exchange weights with other nodes; needs the extra "swarm"
    swarm_listen: str = "/ip4/0.0.0.0/tcp/0"
    #: where the swarm listens; port 0: any. To be reached from outside, choose a port and open it
    swarm_announce: Annotated[tuple[PeerAddress, ...], Field(max_length=8)] = ()
    #: addresses told to others, for example /ip4/203.0.113.5/tcp/4101; none: where we listen, as seen from outside
    swarm_max_peers: Annotated[int, Field(ge=1, le=256)] = 32
    #: connections to other nodes made by us; about as many more are taken
    swarm_up_mb_s: Annotated[float, Field(gt=0)] | None = None
    #: bandwidth for serving other nodes, in megabytes per second; none: no limit
    swarm_down_mb_s: Annotated[float, Field(gt=0)] | None = None
    #: bandwidth for fetching from other nodes, in megabytes per second; none: no limit
    min_free_mb: Annotated[int, Field(ge=0)] = 256
    #: no new work below this much free disk, in MiB
    log_level: str = "INFO"
    #: DEBUG, INFO, WARNING or ERROR
