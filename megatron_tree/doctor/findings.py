"""What the doctor finds: rows in sections, and how they are printed."""

from __future__ import annotations

from typing import NamedTuple

OK, NOTE, MISSING = "ok", "note", "missing"
_MARKS = {OK: " ", NOTE: "-", MISSING: "!"}


class Row(NamedTuple):
    """One finding."""

    what: str
    value: str
    note: str = ""
    """Why it is so, or the way to change it."""
    state: str = OK
    """"ok"; "note": it works, but better would be possible; "missing": the configuration needs it."""


class Section(NamedTuple):
    """Findings under one heading."""

    title: str
    rows: list[Row]


def missing(sections: list[Section]) -> list[Row]:
    """The rows that keep the configuration from running."""
    return [row for section in sections for row in section.rows if row.state == MISSING]


def as_text(sections: list[Section]) -> str:
    """A table for each section, then what is missing."""
    lines = []
    for section in sections:
        lines += ["", section.title]
        widths = [max(len(row[i]) for row in section.rows) for i in range(2)]
        for row in section.rows:
            cells = [_MARKS[row.state], row.what.ljust(widths[0]), row.value.ljust(widths[1]), row.note]
            lines.append("  ".join(cells).rstrip())
    lacking = missing(sections)
    lines += ["", f"missing ({len(lacking)}, marked ! above):" if lacking else "nothing that is needed is missing"]
    lines += [f"  {row.what}: {row.note or row.value}" for row in lacking]
    return "\n".join(lines[1:])


def as_json(sections: list[Section]) -> dict:
    """The same for programs."""
    return {
        "ok": not missing(sections),
        "sections": {section.title: [row._asdict() for row in section.rows] for section in sections},
        "missing": [row._asdict() for row in missing(sections)],
    }
