"""Founding a run: keys, store, signed manifest, database and the first join link, all or nothing."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy.exc import DBAPIError

from coordinator import event_log, invites
from coordinator.calibrations import calibrated
from coordinator.database import Database, sqlite_url
from coordinator.experts import route_rules
from coordinator.keyring import new_token, write_secret
from coordinator.presets import Preset
from coordinator.quantisation import check_steps
from protocol.api import JoinLink
from protocol.clock import Clock
from protocol.errors import E_CONFIG, E_KEY_FILE, E_STORE, LocalFault
from protocol.identity import Identity
from protocol.messages import Environment, ModelSpec, Roles, RunManifest, SamplingRules
from protocol.store import Store, open_store
from protocol.tokenizer import Tokenizer
from protocol.weights.layout import read_safetensors

DAY_MS: Final = 86_400_000
#: How long a run's manifest and its first join link hold.
RUN_MS: Final = 365 * DAY_MS
#: Files of a model folder that nodes and verifiers need besides the weights, as far as they are there.
MODEL_FILES: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "added_tokens.json",
)
#: What to do when something could not be written.
_ROOM_HINT: Final = "nothing was made; see to free space and permissions, or choose another DIR"
#: One part of a host name, between dots.
_LABEL: Final = re.compile("[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Founding:
    """What a run is founded from."""

    preset: Preset
    model: Path  #: Hugging Face folder of the first version
    host: str
    port: int
    data: Path | None = None  #: data of the preset's task, for tasks that need some
    name: str = ""
    max_versions: int | None = None  #: instead of the preset's
    seed: int | None = None  #: makes the run id, and with it all tasks and draws, repeatable
    store_url: str = ""  #: empty: ``store`` in the directory
    calibrations: tuple[Path, ...] = ()  #: signed records; each replaces or adds the profile it is about


def found(directory: Path, founding: Founding, clock: Clock) -> JoinLink:
    """Make the directory of a run and return its join link.

    The directory appears complete or not at all.

    Raises:
        LocalFault: ``E_CONFIG`` when it exists and is not empty, when the disk is full or fails, when the host is none,
            when data is given that no task uses, when the model folder lacks something, or when honest nodes could not
            stay within the limits of their profile; what the parts raise.
    """
    check_host(founding.host)
    check_data(founding.preset, founding.data)
    directory = directory.resolve()
    scratch = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    try:
        taken = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
        if not taken:
            directory.parent.mkdir(parents=True, exist_ok=True)
            scratch.mkdir(mode=0o700)  # the database holds draw keys that are not revealed yet
    except OSError as error:
        raise LocalFault(
            E_CONFIG, f"cannot make {directory}", expected="a directory that may be created", got=str(error),
            hint="choose another DIR",
        ) from None
    if taken:
        raise LocalFault(
            E_CONFIG, f"{directory} is taken", expected="a new or an empty directory",
            got="a directory that is not empty" if directory.is_dir() else "a file",
            hint="assay coordinator serve DIR goes on with a run that is there; else choose another DIR",
        )
    try:
        link = _fill(scratch, founding, clock.now_ms())
        if directory.exists():
            directory.rmdir()
        scratch.rename(directory)
    except (OSError, DBAPIError) as error:
        raise LocalFault(
            E_CONFIG, f"cannot write {directory}", expected="a disk with room for the run", got=_reason(error),
            hint=_ROOM_HINT,
        ) from None
    except LocalFault as error:
        if error.code in (E_KEY_FILE, E_STORE):
            error.hint = _ROOM_HINT
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return link


def _reason(error: OSError | DBAPIError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error.orig)


def check_host(host: str) -> None:
    """Refuse what no node can dial.

    Raises:
        LocalFault: ``E_CONFIG``.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return
    try:
        name = host.encode("idna").decode("ascii").removesuffix(".")
    except UnicodeError:
        name = ""
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise LocalFault(
            E_CONFIG, "--host is no address that nodes can dial",
            expected="a host name or an IP address, without http:// and without a port", got=repr(host[:200]),
            hint="the port goes to --port",
        )


def check_data(preset: Preset, data: Path | None) -> None:
    """Refuse data that no task would use.

    Raises:
        LocalFault: ``E_CONFIG``.
    """
    if data is not None and not any(_needs_data(environment) for environment in preset.environments):
        kinds = ", ".join(environment.kind for environment in preset.environments)
        raise LocalFault(
            E_CONFIG, f"the task {kinds} uses no data", expected="no --data", got=data,
            hint="leave --data out, or choose the task that it is for, like --task gsm8k",
        )


def _needs_data(environment: Environment) -> bool:
    return environment.kind == "gsm8k" and environment.data_sha256 is None


def _fill(directory: Path, founding: Founding, now_ms: int) -> JoinLink:
    store = open_store(founding.store_url or f"dir:{directory / 'store'}", make=True)
    keys = {name: Identity.generate() for name in ("root", "coordinator", "learner", "verifier")}
    for name, key in keys.items():
        key.save(directory / "keys" / f"{name}.key")
    manifest = _manifest(founding, store, keys, now_ms)
    (directory / "manifest.json").write_bytes(manifest.sign(keys["root"]).to_bytes())
    (directory / "root.pub").write_text(keys["root"].public_key.hex() + "\n", encoding="ascii")
    write_secret(directory / "admin.token", new_token())
    (directory / "coordinator.toml").write_text(_settings(founding), encoding="utf-8")
    (directory / "learner.toml").write_text(_learner_settings(founding.preset), encoding="utf-8")
    token = _database(directory, manifest, now_ms)
    link = JoinLink(founding.host, founding.port, keys["root"].public_key.hex(), manifest.run_id, token)
    write_secret(directory / "link.txt", link.format())
    return link


def _database(directory: Path, manifest: RunManifest, now_ms: int) -> str:
    database = Database(sqlite_url(directory / "coordinator.db"))
    database.upgrade()
    with database.write() as session:
        event_log.append(session, now_ms, "founded", {"run_id": manifest.run_id, "name": manifest.name})
        token = invites.create(session, now_ms, label="first link", ttl_ms=RUN_MS, uses=None)
    database.close()
    return token


def _manifest(founding: Founding, store: Store, keys: dict[str, Identity], now_ms: int) -> RunManifest:
    preset, model = founding.preset, _model(founding, store)
    batch = preset.batch
    if founding.max_versions is not None:
        batch = batch.model_copy(update={"max_versions": founding.max_versions})
    sampling = _sampling(founding)
    profiles = calibrated(preset.profiles, founding.calibrations, model.layout_sha256)
    check_steps(sampling, profiles)
    return RunManifest(
        run_id=_run_id(founding),
        name=founding.name or preset.name,
        created_at_ms=now_ms,
        expires_at_ms=now_ms + RUN_MS,
        model=model,
        environments=[_environment(environment, founding.data, store) for environment in preset.environments],
        sampling=sampling,
        batch=batch,
        audit=preset.audit,
        profiles=profiles,
        roles=Roles(
            coordinator=keys["coordinator"].public_key.hex(), learner=keys["learner"].public_key.hex(),
            verifiers=[keys["verifier"].public_key.hex()],
        ),
    )


def _run_id(founding: Founding) -> str:
    if founding.seed is None:
        return secrets.token_hex(16)
    text = f"assay.run-id.v1\0{founding.preset.name}\0{founding.name}\0{founding.seed}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _model(founding: Founding, store: Store) -> ModelSpec:
    weights = sorted(founding.model.glob("*.safetensors"))
    if not weights:
        raise LocalFault(
            E_CONFIG, f"{founding.model} holds no weights", expected="a Hugging Face folder with *.safetensors",
            hint=f"assay learner init-model --preset {founding.preset.model} --out DIR makes one",
        )
    layout, _ = read_safetensors(*weights)
    store.put(layout.to_bytes())
    files = {name: (founding.model / name).read_bytes() for name in MODEL_FILES if (founding.model / name).is_file()}
    return ModelSpec(
        name=founding.preset.model, layout_sha256=layout.sha256, state_hash=founding.preset.state_hash,
        files={name: store.put(data) for name, data in files.items()},
    )


def _environment(environment: Environment, data: Path | None, store: Store) -> Environment:
    if not _needs_data(environment):
        return environment
    if data is None:
        raise LocalFault(
            E_CONFIG, f"task {environment.kind} needs its data", expected="--data FILE",
            hint="GSM8K's train.jsonl: one {question, answer} object per line",
        )
    try:
        content = data.read_bytes()
    except OSError as error:
        raise LocalFault(E_CONFIG, f"cannot read the data {data}", got=str(error)) from None
    return environment.model_copy(update={"data_sha256": store.put(content)})


def _sampling(founding: Founding) -> SamplingRules:
    """Sampling rules with the vocabulary of the model: the width of its logits and the tokens that end a completion."""
    config = _json(founding.model / "config.json")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise LocalFault(E_CONFIG, f"{founding.model}/config.json names no vocab_size", got=vocab_size)
    eos = {Tokenizer.load(founding.model).eos_token_id}
    generation = founding.model / "generation_config.json"
    if generation.is_file():
        named = _json(generation).get("eos_token_id")
        eos |= set(named if isinstance(named, list) else [named]) - {None}
    routes = None
    if founding.preset.sampling.record_routes:
        routes = route_rules(config, read_safetensors(*sorted(founding.model.glob("*.safetensors")))[0])
    return founding.preset.sampling_rules(sorted(int(token) for token in eos), vocab_size, routes)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LocalFault(E_CONFIG, f"cannot read {path}", got=str(error)) from None
    if not isinstance(value, dict):
        raise LocalFault(E_CONFIG, f"{path} is malformed", expected="a JSON object", got=type(value).__name__)
    return value


def _settings(founding: Founding) -> str:
    lines = [f"host = {json.dumps(founding.host)}", f"port = {founding.port}"]
    if founding.store_url:
        lines.append(f"store_url = {json.dumps(founding.store_url)}")
    return "\n".join(["# Settings of assay coordinator serve; docs/settings.md lists all of them.", *lines, ""])


def _learner_settings(preset: Preset) -> str:
    """What the preset wants of the learner. It is no part of the manifest: nobody has to trust it."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in sorted(preset.learner.items())]
    return "\n".join(["# For assay learner run --config FILE; docs/learner.md lists all settings.", *lines, ""])
