"""``assay weights`` against the reading side of a coordinator over HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from protocol.errors import E_USAGE, AssayError, LocalFault
from protocol.identity import Identity
from protocol.messages import ChunkRef
from protocol.store import DirectoryStore
from protocol.weights.diff import encode_diff
from protocol.weights.layout import copy_state, read_safetensors, write_safetensors
from protocol.weights.progress import Progress
from protocol.weights.skips import SkipMaker, index_name
from protocol.weights.state_root import LEAF_BYTES
from protocol.weights_cli import app
from tests.fakes.checkpoints import LEARNER, RUN_ID, FakeLearner, same_bits
from tests.fakes.clock import FakeClock
from tests.fakes.learning import load_model, make_model_dir
from tests.fakes.office_server import ROOT, Office, manifest_of, open_office

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["sha-256"])
def office(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[Office]:
    """A tiny real model, twelve versions of it, anchors at 0, 5 and 10, and a relay."""
    layout, state = load_model(model)
    learner = FakeLearner(DirectoryStore(tmp_path / "store"), layout=layout, state_hash=request.param)
    learner.first = state
    maker = SkipMaker(learner.store, LEARNER, RUN_ID, layout)
    for version in range(12):
        learner.publish(anchor=version % 5 == 0, density=0.001)
        bases = ((learner.manifests[base], learner.states[base]) for base in maker.due(version))
        maker.make(learner.manifests[version], learner.states[version], bases)
    files = {path.name: learner.store.put(path.read_bytes()) for path in model.iterdir() if path.suffix == ".json"}
    with open_office(Office(learner, manifest_of(learner, files))) as office:
        yield office


def call(office: Office, verb: str, *arguments: str, root: Identity = ROOT) -> Result:
    words = [verb, "--coordinator", office.url, "--root", root.public_key.hex(), *arguments]
    return CliRunner().invoke(app, words)


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ls(office: Office) -> None:
    table = call(office, "ls")
    assert table.exit_code == 0
    assert len(table.stdout.splitlines()) == 2 + 12
    rows = lines(call(office, "ls", "--json"))
    assert [row["version"] for row in rows] == list(range(12))
    assert [bool(row["anchor_bytes"]) for row in rows] == [version % 5 == 0 for version in range(12)]
    assert rows[8]["skips"]


def test_another_root_key_and_no_root_key(office: Office) -> None:
    result = call(office, "ls", root=Identity(bytes(32)))
    assert isinstance(result.exception, AssayError)
    assert result.exception.code == "E_SIGNATURE"
    result = CliRunner().invoke(app, ["ls", "--coordinator", office.url, "--root", "xyz"])
    assert isinstance(result.exception, AssayError)
    assert (result.exception.code, bool(result.exception.hint)) == ("E_USAGE", True)


def test_verify_finds_what_is_missing_and_what_is_damaged(office: Office, tmp_path: Path) -> None:
    cache = ["--cache", str(tmp_path / "cache")]
    good = call(office, "verify", "--deep", *cache)
    assert (good.exit_code, good.stdout.strip()) == (0, "12 versions, roots and chunks checked: nothing bad")
    gone, torn = (office.learner.manifests[version].diff[0].sha256 for version in (3, 7))
    store = office.learner.store
    assert isinstance(store, DirectoryStore)
    store.delete(gone)
    file = store.path / torn[:2] / torn
    data = file.read_bytes()
    file.unlink()
    office_get = office.learner.store.get
    served = {torn: data[:-1] + bytes([data[-1] ^ 1])}
    office.learner.store.get = lambda key, *rest: served.get(key) or office_get(key, *rest)  # type: ignore[method-assign]
    office.learner.store.has = lambda key: key in served or DirectoryStore.has(store, key)  # type: ignore[method-assign]
    bad = call(office, "verify", "--json", "--cache", str(tmp_path / "other"))
    assert bad.exit_code == 1
    *found, last = lines(bad)
    assert [(row["version"], row["code"]) for row in found] == [(3, "E_NOT_FOUND"), (7, "E_OBJECT_HASH")]
    assert last == {"versions": 12, "deep": False, "bad": 2}


@pytest.mark.parametrize("office", ["sha-256", "blake3"], indirect=True)
def test_verify_says_which_tensors_of_a_model_are_damaged(office: Office, tmp_path: Path) -> None:
    out, cache = tmp_path / "out", ["--cache", str(tmp_path / "cache")]
    assert call(office, "export", "--out", str(out), "--version", "7", *cache).exit_code == 0
    place = ["--model", str(out), "--json", *cache]
    good = call(office, "verify", *place)
    assert good.exit_code == 0
    assert [(row["version"], row["same"]) for row in lines(good)] == [(7, True)]
    layout, state = read_safetensors(out / "model.safetensors")
    last = layout.entries[-1]
    state = copy_state(state)
    state[last.name].reshape(-1)[-1] ^= 1
    write_safetensors(out / "model.safetensors", layout, state)
    bad = call(office, "verify", *place, "--version", "7")
    assert bad.exit_code == 1
    *places, said = lines(bad)
    leaf = (layout.nbytes - 1) // LEAF_BYTES * LEAF_BYTES
    under = [entry for entry in layout.entries if entry.offset + entry.nbytes > leaf and entry.nbytes]
    assert [row["tensor"] for row in places] == [entry.name for entry in under]
    assert places[-1] == {"tensor": last.name, "start": max(0, leaf - last.offset), "end": last.nbytes}
    assert (said["version"], said["same"], said["tensors"]) == (7, False, sorted(entry.name for entry in under))
    words = call(office, "verify", "--model", str(out / "model.safetensors"), "--version", "7", *cache)
    assert f"differs: {last.name} bytes" in words.stdout
    assert "are not version 7" in words.stdout
    other = call(office, "verify", "--model", str(tmp_path))
    assert isinstance(other.exception, AssayError)
    assert other.exception.code == "E_USAGE"


@pytest.mark.parametrize("office", ["blake3"], indirect=True)
def test_a_run_by_blake3_is_verified_and_exported(office: Office, tmp_path: Path) -> None:
    cache = ["--cache", str(tmp_path / "cache")]
    assert call(office, "verify", "--deep", *cache).exit_code == 0
    assert call(office, "export", "--out", str(tmp_path / "out"), *cache).exit_code == 0
    assert same_bits(read_safetensors(tmp_path / "out" / "model.safetensors")[1], office.learner.states[-1])
    leaves = office.learner.manifests[4].leaves
    assert leaves is not None
    office.learner.store.delete(leaves.sha256)
    bad = call(office, "verify", "--json", "--cache", str(tmp_path / "other"))
    assert [(row["version"], row["code"]) for row in lines(bad)[:-1]] == [(4, "E_NOT_FOUND")]


def test_a_damaged_version_is_located_by_verify_deep(office: Office, tmp_path: Path) -> None:
    learner = office.learner
    wrong = copy_state(learner.states[-1])
    name = learner.layout.entries[0].name
    wrong[name].reshape(-1)[0] ^= 1
    learner.publish(density=0.001)
    chunks = encode_diff(learner.layout, learner.states[-2], wrong)
    refs = [ChunkRef(sha256=learner.store.put(c), size_bytes=len(c), max_output_bytes=2**20) for c in chunks]
    lie = learner.manifests[-1].model_copy(update={"diff": refs})
    learner.manifests[-1], learner.envelopes[-1] = lie, lie.sign(LEARNER)
    bad = call(office, "verify", "--deep", "--json", "--from", "11", "--cache", str(tmp_path / "cache"))
    assert bad.exit_code == 1
    row = lines(bad)[0]
    assert (row["version"], row["code"]) == (12, "E_STATE_ROOT")
    assert f"{name} bytes 0 to " in str(row["why"])


def test_gc_deletes_only_when_told_and_only_what_nobody_needs(office: Office, tmp_path: Path) -> None:
    store = office.learner.store
    assert isinstance(store, DirectoryStore)
    place = ["--store", f"dir:{store.path}", "--keep", "0", "--json"]
    office.oldest_version_needed = 6  # a lease, say
    (said,) = lines(call(office, "gc", *place))
    assert (said["oldest_needed"], said["kept_from_anchor"], said["deleted"]) == (6, 5, 0)
    (done,) = lines(call(office, "gc", *place, "--delete"))
    assert done["deleted"] == done["objects"] == said["objects"]
    assert not store.has(office.learner.manifests[0].anchor[0].sha256)
    for manifest in office.learner.manifests[6:]:
        assert all(store.has(ref.sha256) for ref in [*manifest.diff, *manifest.anchor])
    assert store.has(office.learner.layout.sha256)
    assert all(store.has(sha256) for sha256 in office.run.model.files.values())
    assert call(office, "verify", "--from", "6", "--cache", str(tmp_path / "c")).exit_code == 0
    office.oldest_version_needed = None
    refused = call(office, "gc", *place)
    assert isinstance(refused.exception, AssayError)
    assert refused.exception.code == "E_USAGE"


def test_a_relay_makes_what_is_missing_and_no_more(office: Office, tmp_path: Path) -> None:
    store = office.learner.store
    assert isinstance(store, DirectoryStore)
    (store.path / "index" / index_name(office.learner.manifests[8])).unlink()
    words = ["--store", f"dir:{store.path}", "--cache", str(tmp_path / "cache"), "--json"]
    *made, last = lines(call(office, "relay", *words))
    assert sorted((row["from"], row["to"]) for row in made) == [(0, 8), (4, 8)]
    assert last["made"] == 2
    assert lines(call(office, "relay", *words, "--since", "5"))[-1]["made"] == 0
    follower = office.learner.follower()
    follower.advance(office.learner.envelopes[:1])
    way = follower._way(office.learner.envelopes[:9])
    assert way is not None
    assert last["relay"] in {step.relay for step in way.steps}
    assert follower.follow(way)
    assert same_bits(follower.state, office.learner.states[8])


@pytest.mark.parametrize("version", [3, -1])
def test_export_writes_a_folder_that_transformers_loads(office: Office, tmp_path: Path, version: int) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    result = call(office, "export", "--out", str(out), "--version", str(version), "--cache", str(tmp_path / "cache"))
    assert result.exit_code == 0, result.output
    assert "B in all" in result.stdout
    layout, state = read_safetensors(out / "model.safetensors")
    assert layout.entries == office.learner.layout.entries
    assert same_bits(state, office.learner.states[version])
    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    before = office.served
    again = call(office, "export", "--out", str(out), "--version", str(version), "--cache", str(tmp_path / "cache"))
    assert again.exit_code == 0
    assert office.served == before  # every chunk was in the cache
    progress = [json.loads(line) for line in again.stderr.splitlines() if line.startswith("{")]
    assert progress[-1]["event"] == "progress"


def test_an_export_overwrites_no_other_weights(office: Office, tmp_path: Path) -> None:
    cache = ("--cache", str(tmp_path / "cache"))
    for weights in ("model.safetensors", "model-00001-of-00002.safetensors"):
        out = tmp_path / weights
        out.mkdir()
        write_safetensors(out / weights, office.learner.layout, office.learner.states[1])
        before = (out / weights).read_bytes()
        refused = call(office, "export", "--out", str(out), "--version", "3", *cache)
        assert isinstance(refused.exception, AssayError)
        assert (refused.exception.code, refused.exception.got) == ("E_USAGE", weights)
        assert [(file.name, file.read_bytes()) for file in out.iterdir()] == [(weights, before)]
    assert call(office, "export", "--out", str(tmp_path / "model.safetensors"), "--version", "1", *cache).exit_code == 0


def test_a_folder_with_another_configuration_is_not_the_version(office: Office, tmp_path: Path) -> None:
    out, cache = tmp_path / "out", ["--cache", str(tmp_path / "cache")]
    call(office, "export", "--out", str(out), "--version", "7", *cache)
    name = next(iter(office.run.model.files))
    (out / name).write_text("{}")
    found = call(office, "verify", "--model", str(out), *cache)
    assert found.exit_code == 1
    assert "are version 7, bit for bit" in found.stdout
    assert f"differs: {name}" in found.stdout
    assert call(office, "verify", "--model", str(out / "model.safetensors"), *cache).exit_code == 0


def test_there_is_no_such_version(office: Office, tmp_path: Path) -> None:
    result = call(office, "export", "--out", str(tmp_path / "out"), "--version", "99")
    assert isinstance(result.exception, AssayError)
    assert result.exception.code == "E_USAGE"


def test_an_export_stays_out_of_what_it_reads(office: Office, tmp_path: Path) -> None:
    cache, mirror = tmp_path / "cache", tmp_path / "mirror"
    mirror.mkdir()
    for out in (cache, cache / "inner", mirror):
        places = ("--cache", str(cache), "--mirror", f"dir:{mirror}")
        result = call(office, "export", "--out", str(out), *places)
        assert isinstance(result.exception, AssayError)
        assert result.exception.code == "E_USAGE"
        assert "would overwrite" in result.exception.message
    assert not list(mirror.iterdir())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_json_lines_elsewhere() -> None:
    for out in (_Terminal(), io.StringIO()):
        clock = FakeClock()
        progress = Progress("weights", 4 * 2**20, out, clock=clock)
        for _ in range(4):
            clock.advance(3.0)
            progress.part("a", 2**20)
        progress.close()
        text = out.getvalue()
        if out.isatty():
            assert text.count("\r") == 5
            assert "100% of 4.0 MiB" in text.rsplit("\r", 1)[-1]
        else:
            told = [json.loads(line) for line in text.splitlines()]
            assert [line["bytes"] for line in told] == [2**20, 2 * 2**20, 3 * 2**20, 4 * 2**20, 4 * 2**20]
            assert told[-1]["sources"] == {"a": 4 * 2**20}


def test_verify_does_not_pass_on_versions_that_there_are_not(office: Office, tmp_path: Path) -> None:
    cache = ["--cache", str(tmp_path / "cache")]
    assert call(office, "verify", "--from", "11", *cache).stdout.startswith("1 versions, ")
    beyond = call(office, "verify", "--from", "12", *cache)
    assert isinstance(beyond.exception, LocalFault)
    assert (beyond.exception.code, beyond.exception.expected, beyond.exception.got) == (E_USAGE, "--from 0 to 11", 12)
    assert call(office, "verify", "--from", "-1", *cache).exit_code == 2
