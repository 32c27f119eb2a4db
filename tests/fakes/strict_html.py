"""A reader of HTML that forgives nothing, so that tests notice a page which a browser would silently mend.

It asks for what the HTML standard asks for (https://html.spec.whatwg.org/multipage/syntax.html) as far as our pages
use it: the doctype first, elements that exist, every element closed in order, no attribute twice, no id twice, no bare
``&`` or ``<``, and nothing but phrasing inside ``p``, ``pre``, headings and cells' inline elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import entities
from html.parser import HTMLParser

VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "wbr"})
PHRASING = frozenset({"a", "b", "br", "code", "em", "span", "strong", "svg", "time", "wbr"})
FLOW = PHRASING | {
    "dd", "details", "div", "dl", "dt", "h1", "h2", "h3", "header", "li", "main", "ol", "p", "pre", "section",
    "summary", "table", "tbody", "td", "th", "thead", "tr", "ul",
}
DOCUMENT = frozenset({"html", "head", "body", "title", "style", "meta", "link", "script"})
SVG = frozenset({"circle", "g", "line", "path", "polyline", "rect", "text", "title"})
#: Elements that hold phrasing only.
PHRASING_ONLY = frozenset({"p", "pre", "h1", "h2", "h3", "span", "code", "a", "b", "em", "strong", "dt"})
#: Elements that may stand only right inside others.
PARENTS = {
    "html": {""}, "head": {"html"}, "body": {"html"}, "style": {"head"}, "meta": {"head"}, "link": {"head"},
    "li": {"ul", "ol"}, "dt": {"dl"}, "dd": {"dl"}, "tr": {"table", "tbody", "thead"}, "td": {"tr"}, "th": {"tr"},
}


class BadHtml(ValueError):
    """What is wrong, and where."""


@dataclass
class Element:
    """One element: its attributes and all the text inside it."""

    name: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def find(self, name: str, **attributes: str) -> list[Element]:
        """All elements below of this name that have these attributes (``class_`` for ``class``)."""
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        found = []
        for child in self.children:
            if child.name == name and wanted.items() <= child.attributes.items():
                found.append(child)
            found += child.find(name, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.root = Element("", {})
        self.open = [self.root]
        self.ids: set[str] = set()
        self.doctype = False

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            line, column = self.getpos()
            raise BadHtml(f"line {line}, column {column}: {what}, inside {'/'.join(e.name for e in self.open[1:])}")

    def handle_decl(self, decl: str) -> None:
        self._require(decl.lower() == "doctype html" and not self.root.children, f"<!{decl}>")
        self.doctype = True

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._require(self.doctype, "no doctype before the first element")
        names = [element.name for element in self.open]
        inside_svg = "svg" in names
        self._require(tag in (SVG if inside_svg else FLOW | DOCUMENT), f"unknown element {tag}")
        self._require(len({name for name, _ in attrs}) == len(attrs), f"an attribute of {tag} stands twice")
        attributes = {name: value or "" for name, value in attrs}
        if "id" in attributes:
            self._require(attributes["id"] not in self.ids, f"id {attributes['id']} stands twice")
            self.ids.add(attributes["id"])
        if not inside_svg:
            self._require(names[-1] in PARENTS.get(tag, {names[-1]}), f"{tag} inside {names[-1]}")
            holder = next((name for name in names if name in PHRASING_ONLY), None)
            self._require(holder is None or tag in PHRASING, f"{tag} inside {holder}")
        element = Element(tag, attributes)
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._require(any(e.name == "svg" for e in self.open) or tag in VOID, f"{tag} closes itself")
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        self._require(self.open[-1].name == tag, f"</{tag}> where </{self.open[-1].name}> is due")
        self.open.pop()

    def handle_data(self, data: str) -> None:
        verbatim = self.open[-1].name in {"style", "script"}
        self._require(verbatim or not ({"&", "<"} & set(data)), f"bare & or < in {data[:40]!r}")
        self._require(len(self.open) > 1 or not data.strip(), f"text outside html: {data[:40]!r}")
        self._say(data)

    def handle_entityref(self, name: str) -> None:
        self._require(f"{name};" in entities.html5, f"unknown &{name};")
        self._say(entities.html5[f"{name};"])

    def handle_charref(self, name: str) -> None:
        number = int(name[1:], 16) if name[0] in "xX" else int(name)
        self._require(0 < number < 0x110000, f"no character &#{name};")
        self._say(chr(number))

    def handle_comment(self, data: str) -> None:
        self._require("--" not in data, "-- inside a comment")

    def unknown_decl(self, data: str) -> None:
        self._require(False, f"<![{data}")

    def handle_pi(self, data: str) -> None:
        self._require(False, f"<?{data}>")

    def _say(self, text: str) -> None:
        for element in self.open:
            element.text += text


def read_html(text: str) -> Element:
    """The document's ``html`` element.

    Raises:
        BadHtml: anything that a browser would have to mend.
    """
    reader = _Reader()
    reader.feed(text)
    reader.close()
    if len(reader.open) > 1:
        raise BadHtml(f"never closed: {[element.name for element in reader.open[1:]]}")
    if [child.name for child in reader.root.children] != ["html"]:
        raise BadHtml(f"expected one html element, got {[child.name for child in reader.root.children]}")
    [html] = reader.root.children
    if [child.name for child in html.children] != ["head", "body"] or not html.find("title"):
        raise BadHtml("expected a head with a title, and a body")
    return html
