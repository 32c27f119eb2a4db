"""``assay weights``: look at, check, clear up and export what a run has published.

Exit codes: 0 all is well, 1 something is damaged, missing or could not be done, 2 bad usage or configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protocol.text import printable

if TYPE_CHECKING:
    from protocol.store import Store
    from protocol.weights.catalogue import Catalogue
    from protocol.weights.pool import SourcePool

EPILOG: Final = """\b
Examples:
  assay weights ls --coordinator http://HOST:8700 --root HEX
  assay weights verify --coordinator http://HOST:8700 --root HEX --deep
  assay weights gc --coordinator http://HOST:8700 --root HEX --store dir:run/store --delete
  assay weights relay --coordinator http://HOST:8700 --root HEX --store dir:run/store
  assay weights export --coordinator http://HOST:8700 --root HEX --version 12 --out model-12

\b
Exit codes: 0 well, 1 damaged, missing or failed, 2 bad usage or configuration.
"""

app = typer.Typer(
    help="Look at, check, clear up and export published weights.", no_args_is_help=True, epilog=EPILOG,
    rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)

CoordinatorOption = Annotated[str, typer.Option("--coordinator", help="The coordinator's address.")]
RootOption = Annotated[str, typer.Option("--root", help="Root public key of the run, hex; all else is checked by it.")]
MirrorOption = Annotated[
    list[str] | None, typer.Option("--mirror", help="One more source: http(s)://, dir:PATH, s3://BUCKET/PREFIX.")
]
CacheOption = Annotated[Path, typer.Option("--cache", help="Folder for fetched chunks; a second call goes on there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]
DEFAULT_CACHE: Final = Path("~/.cache/assay/chunks")


@contextmanager
def _catalogue(coordinator: str, root: str) -> Iterator[Catalogue]:
    from protocol.client import CoordinatorClient
    from protocol.identity import root_key
    from protocol.weights.catalogue import Catalogue

    trusted = root_key(root).hex()
    with CoordinatorClient(coordinator, None) as client:
        yield Catalogue.read(client, trusted)


@contextmanager
def _pool(coordinator: str, mirrors: list[str] | None, cache: Path) -> Iterator[SourcePool]:
    from protocol.weights.cache import ChunkCache
    from protocol.weights.pool import SourcePool
    from protocol.weights.sources import HttpSource, source_at

    folder = cache.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*map(source_at, mirrors or []), HttpSource.coordinator(coordinator)]
    with closing(SourcePool(sources, ChunkCache(folder))) as pool:
        yield pool


def _say(as_json: bool, value: dict[str, Any], words: str) -> None:
    print(json.dumps(value) if as_json else words)


@app.command(epilog="Example: assay weights ls --coordinator http://127.0.0.1:8700 --root HEX")
def ls(coordinator: CoordinatorOption, root: RootOption, as_json: JsonOption = False) -> None:
    """List the versions: when, how large the diff, which skips lead there, and whether there is an anchor."""
    with _catalogue(coordinator, root) as catalogue:
        if not as_json:
            print(f"run {printable(catalogue.run.name)}, {catalogue.layout.nbytes:,} bytes of weights")
            print(f"{'version':>8} {'diff bytes':>13} {'vs full':>9} {'anchor bytes':>14}  skips from")
        for manifest in catalogue.manifests:
            diff, anchor = (sum(ref.size_bytes for ref in refs) for refs in (manifest.diff, manifest.anchor))
            skips = {skip.from_version: skip.nbytes for skip in catalogue.skips_to(manifest.version)}
            ratio = f"{catalogue.layout.nbytes / diff:.0f}x" if diff else ""
            led = ", ".join(f"{start} ({nbytes:,})" for start, nbytes in sorted(skips.items(), reverse=True))
            _say(as_json, {
                "version": manifest.version, "published_at_ms": manifest.published_at_ms,
                "state_root": manifest.state_root, "diff_bytes": diff, "anchor_bytes": anchor,
                "skips": {str(start): nbytes for start, nbytes in skips.items()},
            }, f"{manifest.version:>8} {_count(diff):>13} {ratio:>9} {_count(anchor):>14}  {led}".rstrip())


def _count(nbytes: int) -> str:
    return f"{nbytes:,}" if nbytes else "-"


@app.command(epilog="Example: assay weights verify --coordinator http://127.0.0.1:8700 --root HEX --deep")
def verify(
    coordinator: CoordinatorOption, root: RootOption,
    first: Annotated[int, typer.Option("--from", min=0, help="First version to look at.")] = 0,
    deep: Annotated[bool, typer.Option("--deep", help="Rebuild every version and compare its root, too.")] = False,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, help="Check this model folder or safetensors file instead; say where it differs."),
    ] = None,
    version: Annotated[int | None, typer.Option(help="With --model: what it should be; default: any, or the newest.")]
    = None,
    mirror: MirrorOption = None, cache: CacheOption = DEFAULT_CACHE, as_json: JsonOption = False,
) -> None:
    """Fetch every chunk and compare its hash; with --deep make every version and compare its root."""
    from protocol.errors import E_USAGE, AssayError, LocalFault

    bad, follower = 0, None
    with _catalogue(coordinator, root) as catalogue, _pool(coordinator, mirror, cache) as pool:
        if model is not None:
            same = _is_version(catalogue, pool, model, version, as_json)
            foreign = catalogue.foreign_files(model) if model.is_dir() else []
            for name in foreign:
                _say(as_json, {"file": name, "same": False}, f"differs: {name} is not the run's, or missing")
            raise typer.Exit(0 if same and not foreign else 1)
        if first >= max(1, len(catalogue.links)):
            newest = len(catalogue.links) - 1
            raise LocalFault(E_USAGE, "no such version", expected=f"--from 0 to {newest}", got=first)
        for link in catalogue.links[first:]:
            found = catalogue.damaged(pool, link.manifest)
            bad += len(found)
            for ref, error in found:
                _say(as_json, {"version": link.version, "chunk": ref.sha256, "code": error.code, "why": str(error)},
                     f"version {link.version}: chunk {ref.sha256[:16]}: {error}")
            if not deep or found:
                continue
            follower = follower or catalogue.follower(pool)
            try:
                follower.advance([link.envelope] if follower.version is not None or link.manifest.anchor
                                 else [earlier.envelope for earlier in catalogue.links[: link.version + 1]])
            except AssayError as error:
                bad += 1
                _say(as_json, {"version": link.version, "chunk": None, "code": error.code, "why": str(error)},
                     f"version {link.version}: {error}")
    count = len(catalogue.links[first:])
    _say(as_json, {"versions": count, "deep": deep, "bad": bad},
         f"{count} versions, {'roots and ' if deep else ''}chunks checked: {bad or 'nothing'} bad")
    raise typer.Exit(1 if bad else 0)


def _is_version(
    catalogue: Catalogue, pool: SourcePool, model: Path, version: int | None, as_json: bool
) -> bool:
    """Whether the weights in a file or folder are those of a version; says which tensors and bytes are not.

    Raises:
        LocalFault: ``E_USAGE`` when there are none, or not of the run's layout.
    """
    from protocol.errors import E_USAGE, LocalFault
    from protocol.weights.layout import read_safetensors

    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    layout, state = read_safetensors(*files) if files else (None, {})
    if layout is None or layout.entries != catalogue.layout.entries:
        raise LocalFault(
            E_USAGE, f"{model} holds no weights of this run", expected=f"layout {catalogue.layout.sha256}",
            got="no *.safetensors" if layout is None else f"layout {layout.sha256}",
        )
    found = catalogue.compare(pool, state, version)
    for place in found.damaged or []:
        _say(as_json, {"tensor": place.tensor, "start": place.start, "end": place.end}, f"differs: {place}")
    number, tensors = found.manifest.version, sorted({place.tensor for place in found.damaged or []})
    if found.same:
        words = f"the weights in {model} are version {number}, bit for bit"
    elif found.damaged is None:
        words = f"the weights in {model} are not version {number}, which has no leaf list to tell where"
    else:
        share = f"{len(tensors)} of {len(state)} tensors"
        words = f"the weights in {model} are not version {number}: {share} differ or lie beside what does"
    _say(as_json, {"version": number, "same": found.same, "root": found.root, "tensors": tensors}, words)
    return found.same


@app.command(epilog="Example: assay weights relay --coordinator http://127.0.0.1:8700 --root HEX --store dir:run/store")
def relay(
    coordinator: CoordinatorOption, root: RootOption,
    store: Annotated[str, typer.Option("--store", help="Where to leave skips: dir:PATH or s3://BUCKET/PREFIX.")],
    since: Annotated[int, typer.Option(min=0, help="Only skips to versions from this one on.")] = 0,
    key: Annotated[Path | None, typer.Option(help="Signing key of the relay; default: a new one.")] = None,
    mirror: MirrorOption = None, cache: CacheOption = DEFAULT_CACHE, as_json: JsonOption = False,
) -> None:
    """Make merged diffs that are missing, so that nodes that were away fetch less. Anybody may."""
    from protocol.identity import Identity
    from protocol.store import open_store
    from protocol.weights.relay import build_skips
    from protocol.weights.skips import SkipMaker

    identity = Identity.generate() if key is None else Identity.load(key)
    with _catalogue(coordinator, root) as catalogue, _pool(coordinator, mirror, cache) as pool:
        maker = SkipMaker(open_store(store, make=True), identity, catalogue.run.run_id, catalogue.layout)
        made = build_skips(catalogue, pool, maker, since=since)
    for skip in made:
        _say(as_json, {"from": skip.from_version, "to": skip.to_version, "bytes": skip.nbytes},
             f"skip {skip.from_version} to {skip.to_version}: {skip.nbytes:,} bytes")
    _say(as_json, {"made": len(made), "relay": identity.public_key.hex()}, f"{len(made)} skips made")


@app.command(epilog="Example: assay weights gc --coordinator http://127.0.0.1:8700 --root HEX --store dir:run/store")
def gc(
    coordinator: CoordinatorOption, root: RootOption,
    store: Annotated[str, typer.Option("--store", help="The store to clear up: dir:PATH or s3://BUCKET/PREFIX.")],
    keep: Annotated[int, typer.Option(min=0, help="Versions to keep before the oldest one needed.")] = 64,
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without it, only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete chunks that no lease, audit, joiner or version within the staleness bound can ask for."""
    from protocol.store import open_store
    from protocol.weights.retention import retention

    with _catalogue(coordinator, root) as catalogue:
        place, run = open_store(store), catalogue.run
        needed = _oldest_needed(catalogue)
        protected = [run.model.layout_sha256, *run.model.files.values()]
        plan = retention(
            catalogue.manifests, catalogue.all_skips(place.announced), max(0, needed - keep), protected
        )
        gone = _delete(place, plan.delete) if delete else 0
    _say(as_json, {
        "oldest_needed": needed, "kept_from_anchor": plan.anchor, "objects": len(plan.delete),
        "bytes": plan.freed_bytes, "deleted": gone,
    }, f"oldest version needed {needed}; everything from the anchor of version {plan.anchor} on is kept\n"
       f"{len(plan.delete)} objects, {plan.freed_bytes:,} bytes " + (f"of which {gone} deleted" if delete
                                                                     else "could go; --delete deletes them"))


def _oldest_needed(catalogue: Catalogue) -> int:
    """What the coordinator says, but never more than the staleness bound allows.

    Raises:
        LocalFault: ``E_USAGE`` when the coordinator cannot tell.
    """
    from protocol.client import CoordinatorClient
    from protocol.errors import E_USAGE, LocalFault

    teller = catalogue.teller
    told = teller.status().get("oldest_version_needed") if isinstance(teller, CoordinatorClient) else None
    if not isinstance(told, int) or isinstance(told, bool) or told < 0:
        raise LocalFault(
            E_USAGE, "the coordinator does not say which versions are needed", expected="oldest_version_needed",
            got=told, hint="use a coordinator of this release",
        )
    return min(told, max(0, catalogue.head.version - catalogue.run.batch.max_lag_versions))


def _delete(store: Store, objects: dict[str, int]) -> int:
    gone = 0
    for sha256 in objects:
        gone += store.has(sha256)
        store.delete(sha256)
    return gone


@app.command(epilog="Example: assay weights export --coordinator http://127.0.0.1:8700 --root HEX --out model")
def export(
    coordinator: CoordinatorOption, root: RootOption,
    out: Annotated[Path, typer.Option("--out", help="Folder to write; transformers loads it.")],
    version: Annotated[int, typer.Option(help="Which version; -1 is the newest.")] = -1,
    mirror: MirrorOption = None, cache: CacheOption = DEFAULT_CACHE, as_json: JsonOption = False,
) -> None:
    """Write a version as a Hugging Face folder, fetched the cheapest way; a second call resumes.

    Progress goes to standard error: a bar on a terminal, JSON lines otherwise.
    """
    from protocol.paths import check_output_folder
    from protocol.weights.progress import Progress
    from protocol.weights.way import cheapest_way

    mirrors = [Path(place.removeprefix("dir:")) for place in mirror or [] if place.startswith("dir:")]
    check_output_folder("--out", out, [("--cache", cache.expanduser()), *(("--mirror", path) for path in mirrors)])
    with _catalogue(coordinator, root) as catalogue, _pool(coordinator, mirror, cache) as pool:
        manifest = catalogue.manifest_at(version)
        way = cheapest_way(catalogue.links[: manifest.version + 1], None, catalogue.teller.skips)
        _say(as_json, {"way": way.describe(), "bytes": way.nbytes}, way.describe())
        follower = catalogue.follower(pool)
        with closing(Progress("weights", pool.missing_bytes(way.refs), sys.stderr)) as progress:
            pool.on_part = progress.part
            pool.fetch_all(way.refs)
        follower.follow(way)
        files = catalogue.export(follower, out)
        _say(as_json, {
            "version": manifest.version, "state_root": manifest.state_root, "files": [str(file) for file in files],
        }, f"version {manifest.version}, root {manifest.state_root}\n" + "\n".join(f"  {file}" for file in files))
