"""Attacks on form: what T0 refuses, or the coordinator at its door."""

from __future__ import annotations

from dataclasses import replace

from protocol import bundle as bundles
from protocol.messages import Lease, UsedCheckpoint
from protocol.rollout import NO_CODE, Bundle, Finish, Segment
from tests.adversary.attack import NoOpportunity, attack, claiming, first, head_at
from tests.adversary.world import EOS, World, identity, replaced
from verifier.submission import Submission

# -- structure ----------------------------------------------------------------------------------------------


@attack(14, "tokens after the end of sequence", "T0", "E_EOS_GRAMMAR")
def after_eos(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout = bundle.rollouts[0]
    position = first(
        t for t in range(len(rollout) - 1) if EOS in head_at(rollout, t) and rollout.token_codes[t] == NO_CODE
    )
    tokens = rollout.tokens.copy()
    tokens[position] = EOS
    return world.submission(lease, replaced(bundle, 0, tokens=tokens))


@attack(12, "stops early without an end of sequence", "T0", "E_EOS_GRAMMAR")
def cut_short(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    rollout, cut = bundle.rollouts[0], 5
    if len(rollout) <= cut:
        raise NoOpportunity
    entries = int(rollout.head_lengths[:cut].sum())
    return world.submission(lease, replaced(
        bundle, 0, tokens=rollout.tokens[:cut], head_lengths=rollout.head_lengths[:cut],
        head_ids=rollout.head_ids[:entries], head_codes=rollout.head_codes[:entries],
        tail_codes=rollout.tail_codes[:cut], token_codes=rollout.token_codes[:cut], finish=Finish.LENGTH,
    ))


@attack(19, "head codes that do not add up", "T0", "E_HEAD_NOT_NORMALISED", "E_HEAD_ORDER")
def unnormalised(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    codes = bundle.rollouts[0].head_codes.copy()
    codes[: bundle.rollouts[0].head_lengths[0]] //= 2
    return world.submission(lease, replaced(bundle, 0, head_codes=codes))


@attack(21, "a sample handed in twice", "T0", "E_SAMPLE_SET")
def duplicated(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, Bundle((bundle.rollouts[0], bundle.rollouts[0], *bundle.rollouts[2:])))


@attack(8, "a losing sample left out", "T0", "E_SAMPLE_SET", door="E_COMMITMENT_MISMATCH")
def dropped_sample(world: World, lease: Lease) -> Submission:
    return world.submission(lease, Bundle(world.honest(lease).rollouts[:3]))


@attack(26, "one token too many counted", "T0", "E_COUNTS", door="E_COMMITMENT_MISMATCH")
def inflated_count(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, bundle, tokens=1 + sum(map(len, bundle.rollouts)))


@attack(17, "checked bundle is not the committed one", "T0", "E_BUNDLE_ROOT")
def split_view(world: World, lease: Lease) -> Submission:
    honest = world.honest(lease)
    other = world.generate(lease, seeds={s: bytes([s]) * 32 for s in lease.samples})
    root = bundles.bundle_root(other, lease.sign(identity("coordinator")).digest)
    return world.submission(lease, honest, bundle_root=root)


@attack(24, "signed by another key", "T0", "E_WRONG_KEY", blames=False)
def wrong_key(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), signer=identity("somebody"))


@attack(24, "signature by another key under the node's name", "T0", "E_SIGNATURE", blames=False)
def forged_signature(world: World, lease: Lease) -> Submission:
    made = world.submission(lease, world.honest(lease), signer=identity("somebody"))
    return replace(made, node_public_key=identity("node").public_key)


@attack(24, "commitment of another run", "T0", "E_WRONG_RUN", door="E_WRONG_RUN", blames=False)
def wrong_run(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), run_id="cd" * 16)


@attack(21, "commitment for another lease", "T0", "E_OTHER_LEASE", door="E_COMMITMENT_MISMATCH", blames=False)
def other_lease(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), lease_sha256="ef" * 32)


@attack(29, "a profile that the run does not know", "T0", "E_UNKNOWN_PROFILE", door="E_COMMITMENT_MISMATCH")
def unknown_profile(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), profile="anything-goes")


@attack(31, "begins with a newer version than the lease says", "T0", "E_SEGMENT_VERSION",
        door="E_COMMITMENT_MISMATCH", later=1)
def wrong_start_version(world: World, lease: Lease) -> Submission:
    segments = [Segment(0, lease.start_version + 1)]
    return world.submission(lease, world.generate(lease, segments=segments))


@attack(31, "a version that was never published", "T0", "E_SEGMENT_VERSION")
def unpublished_version(world: World, lease: Lease) -> Submission:
    """The commitment names what is published, the bundle what is not."""
    claimed = [Segment(0, lease.start_version), Segment(8, 99)]
    named = world.named([lease.start_version])
    return world.submission(lease, claiming(world.honest(lease), claimed), checkpoints=named)


@attack(31, "a version that is not out yet, under a made-up manifest", "T0", "E_VERSION_MISSING",
        door="E_COMMITMENT_CHECKPOINT", blames=False)
def foretold_version(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(8, 99)]
    return world.submission(lease, claiming(world.honest(lease), claimed))


@attack(31, "a made-up manifest of a version that is out", "T0", "E_OTHER_MANIFEST", door="E_COMMITMENT_CHECKPOINT",
        blames=False)
def other_manifest(world: World, lease: Lease) -> Submission:
    made_up = [UsedCheckpoint(version=lease.start_version, manifest_sha256="ef" * 32)]
    return world.submission(lease, world.honest(lease), checkpoints=made_up)


@attack(31, "a version named that no rollout used", "T0", "E_SEGMENT_VERSION", later=1)
def unused_version(world: World, lease: Lease) -> Submission:
    named = world.named([lease.start_version, lease.start_version + 1])
    return world.submission(lease, world.honest(lease), checkpoints=named)


@attack(31, "a swap off the grid", "T0", "E_SEGMENTS", later=1)
def off_grid(world: World, lease: Lease) -> Submission:
    claimed = [Segment(0, lease.start_version), Segment(9, lease.start_version + 1)]
    return world.submission(lease, claiming(world.honest(lease), claimed))


@attack(31, "segments that go back to an older version", "T0", "E_SEGMENTS")
def descending_versions(world: World, lease: Lease) -> Submission:
    """The commitment does not name the older one, or the coordinator would not take it."""
    claimed = [Segment(0, lease.start_version), Segment(8, lease.start_version - 1)]
    named = world.named([lease.start_version])
    return world.submission(lease, claiming(world.honest(lease), claimed), checkpoints=named)


@attack(25, "truncated bundle", "T0", "E_BUNDLE_PACKED", "E_BUNDLE_COLUMNS")
def truncated(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, bundle, data=bundles.encode(bundle)[:-20])


@attack(25, "truncated simple bundle", "T0", "E_BUNDLE_FRAME", "E_TOO_LARGE")
def truncated_simple(world: World, lease: Lease) -> Submission:
    bundle = world.honest(lease)
    return world.submission(lease, bundle, data=bundles.encode_simple(bundle)[:-20])


@attack(25, "decompression bomb", "T0", "E_TOO_LARGE")
def bomb(world: World, lease: Lease) -> Submission:
    import zstandard

    data = zstandard.ZstdCompressor().compress(bytes(200 * 2**20))
    return world.submission(lease, world.honest(lease), data=data)


@attack(25, "bytes that are no bundle", "T0", "E_BUNDLE_FRAME", "E_TOO_LARGE")
def garbage(world: World, lease: Lease) -> Submission:
    return world.submission(lease, world.honest(lease), data=b"not a bundle")



