"""What the doctor reports: findings in sections, printed as tables."""

from __future__ import annotations

from typing import NamedTuple

OK, NOTE, MISSING = "ok", "note", "missing"
_MARKS = {OK: " ", NOTE: "-", MISSING: "!"}


class Finding(NamedTuple):
    """One finding."""

    what: str
    value: str
    note: str = ""
    """The reason, or how to change it."""
    state: str = OK
    """"ok"; "note": works, but could be better; "missing": required by the configuration."""


class Section(NamedTuple):
    """Findings under one heading."""

    title: str
    findings: list[Finding]


def missing(sections: list[Section]) -> list[Finding]:
    """Findings that prevent the configuration from running."""
    return [f for section in sections for f in section.findings if f.state == MISSING]


def as_text(sections: list[Section]) -> str:
    """One table per section, then the list of what is missing."""
    lines = []
    for section in sections:
        lines += ["", section.title]
        widths = [max(len(f[i]) for f in section.findings) for i in range(2)]
        for f in section.findings:
            cells = [_MARKS[f.state], f.what.ljust(widths[0]), f.value.ljust(widths[1]), f.note]
            lines.append("  ".join(cells).rstrip())
    lacking = missing(sections)
    lines += ["", f"missing ({len(lacking)}, marked ! above):" if lacking else "nothing that is needed is missing"]
    lines += [f"  {f.what}: {f.note or f.value}" for f in lacking]
    return "\n".join(lines[1:])
