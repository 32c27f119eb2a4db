"""``assay audit --html``: the page is valid, stands alone, and has the parts that docs/auditing.md promises."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol import bundle as bundles
from protocol.evidence import decode, encode
from protocol.tokenizer import Tokenizer
from tests.adversary.attacks import ATTACKS
from tests.adversary.world import PROFILE, ROOT, World
from tests.fakes.strict_html import BadHtml, Element, read_html
from verifier.audit_cli import app

RUNNER = CliRunner()
BY_NAME = {attack.name: attack.cheat for attack in ATTACKS}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), max_new_tokens=16)


class Page:
    """The page of one audit, and the file it is about."""

    def __init__(self, world: World, folder: Path, submission, *, model: bool = True):
        self.file, self.path = folder / "one <&>.evidence", folder / "audit.html"
        self.file.write_bytes(encode(world.evidence(submission)))
        self.arguments = [str(self.file), "--root", ROOT.public_key.hex()]
        self.arguments += ["--checkpoint", str(world.store.path)] if model else []
        self.exit = RUNNER.invoke(app, [*self.arguments, "--html", str(self.path)]).exit_code
        self.text = self.path.read_text(encoding="utf-8")
        self.html = read_html(self.text)
        self.rollouts = {
            rollout.sample: rollout
            for rollout in bundles.decode(decode(self.file.read_bytes()).bundle, world.run.sampling).rollouts
        }

    def samples(self) -> list[int]:
        """Samples in the order of the page."""
        return [int(heading.text.split()[1].rstrip(":")) for heading in self.html.find("h2")
                if heading.text.startswith("Sample ")]


@pytest.fixture(scope="module")
def cheat(world, tmp_path_factory):
    return Page(world, tmp_path_factory.mktemp("cheat"), BY_NAME["int8 weights"](world, world.lease()))


@pytest.mark.parametrize("name", [None, "int8 weights", "one token edited"])
@pytest.mark.parametrize("model", [True, False])
def test_every_page_is_valid_and_loads_nothing(world, tmp_path, name, model):
    lease = world.lease()
    submission = world.submission(lease, world.honest(lease)) if name is None else BY_NAME[name](world, lease)
    page = Page(world, tmp_path, submission, model=model)
    assert page.exit == (0 if name is None or (name == "int8 weights" and not model) else 1)
    for banned in ("script", "link", "img", "a"):
        assert page.html.find(banned) == []
    assert "//" not in page.text  # no address of any kind
    assert not re.search(r"url\(|@import|\son\w+=", page.text)
    [policy] = page.html.find("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_every_token_has_its_residual_beside_the_band(world, cheat):
    assert cheat.exit == 1
    pictures = cheat.html.find("svg")
    assert len(pictures) == len(cheat.rollouts) == 4
    for picture, sample in zip(pictures, cheat.samples(), strict=True):
        dots = picture.find("circle")
        assert len(dots) == len(cheat.rollouts[sample])
        [band] = picture.find("rect", class_="band")
        top, height = float(band.attributes["y"]), float(band.attributes["height"])
        [limit] = picture.find("line", class_="limit")
        assert float(limit.attributes["y1"]) == top
        decades = math.log10(PROFILE.max_token_kl_micro * 1e-6 / (PROFILE.max_mean_kl_nano * 1e-9))
        per_decade = height / decades
        for dot in dots:
            value = float(dot.find("title")[0].text.rpartition("divergence ")[2].removesuffix(" nats"))
            expected = top - per_decade * math.log10(value / (PROFILE.max_token_kl_micro * 1e-6))
            assert float(dot.attributes["cy"]) == pytest.approx(expected, abs=1.5)
            assert dot.attributes["class"] == ("bad" if value > PROFILE.max_token_kl_micro * 1e-6 else "ok")


def test_the_decoded_text_is_there_and_shows_its_numbers(world, cheat):
    tokenizer = Tokenizer.load(world.model_dir)
    texts = cheat.html.find("p", class_="text")
    for paragraph, sample in zip(texts, cheat.samples(), strict=True):
        rollout, spans = cheat.rollouts[sample], paragraph.find("span")
        decoded = [tokenizer.decode([int(token)]) or f"⟨{int(token)}⟩" for token in rollout.tokens]
        assert [span.text for span in spans] == decoded
        assert all(decoded)  # there is something to point at for every token
        for position, span in enumerate(spans):
            title = span.attributes["title"]
            assert title.startswith(f"position {position}, token {int(rollout.tokens[position])} ")
            assert "divergence " in title


def test_quantiles_ascend_and_end_at_the_worst_dot(cheat):
    tables = [table for table in cheat.html.find("table") if "median" in table.text]
    assert len(tables) == 4
    for table, picture in zip(tables, cheat.html.find("svg"), strict=True):
        rows = {row.find("td")[0].text: [cell.text for cell in row.find("td")[1:]] for row in table.find("tr")[1:]}
        assert set(rows) == {
            "divergence", "head entry", "membership", "tail draw", "tail code", "margin of the draw", "tail mass"
        }
        for name, cells in rows.items():
            assert len(cells) == 4
            if name not in {"tail draw", "tail code"}:  # a rollout may have no tail draw
                numbers = [float(cell) for cell in cells]
                assert numbers == sorted(numbers)
        worst = max(float(dot.find("title")[0].text.rpartition("divergence ")[2].split()[0])
                    for dot in picture.find("circle"))
        assert float(rows["divergence"][-1]) == pytest.approx(worst, rel=1e-2)


def test_the_command_on_the_page_does_the_audit_again(cheat):
    [command] = cheat.html.find("pre")
    words = shlex.split(command.text)
    assert words[:2] == ["assay", "audit"]
    again = RUNNER.invoke(app, [*words[2:], "--json"])
    assert again.exit_code == cheat.exit
    assert '"E_HEAD_KL"' in again.stdout


@pytest.mark.parametrize("damage", [
    lambda text: text.replace("</table>", "", 1), lambda text: text.replace("<p ", "<p id='a' id='b' ", 1),
    lambda text: text.replace("<h2>", "<h2>5 & 6 ", 1), lambda text: text.replace("<!doctype html>", "", 1),
    lambda text: text.replace("<tr>", "<p>", 1), lambda text: text.replace("<h2>", "<h2><table></table>", 1),
    lambda text: text + "<b>", lambda text: text.replace("<dl>", "<blink>", 1),
])
def test_the_reader_forgives_nothing(cheat, damage):
    assert isinstance(read_html(cheat.text), Element)
    with pytest.raises(BadHtml):
        read_html(damage(cheat.text))
