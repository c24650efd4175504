"""The report of an acceptance: checks by section, as JSON, as a page and as lines.

It is made to be attached to an issue, so it says what the machine is (devices, versions, counts)
and not whose: no names of hosts or users, no paths, no environment.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourfold.atomic_files import replace_text
from fourfold.charts import FAINT, GREEN, ORANGE, RED, TEXT

Status = Literal["passed", "failed", "measured", "not shown"]
COLORS: dict[str, str] = {
    "passed": GREEN,
    "failed": RED,
    "measured": TEXT,
    "not shown": ORANGE,
}
FORMAT = 1


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. What is `measured` is there to be read, and cannot fail."""

    name: str
    status: Status
    detail: str = ""
    figures: dict[str, float | None] = field(default_factory=dict)


@dataclass
class ReportSection:
    title: str
    about: str  # what a row shows, in a sentence or two
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def columns(self) -> list[str]:
        """The figures that any of the rows has."""
        return list(dict.fromkeys(name for check in self.checks for name in check.figures))


@dataclass
class AcceptanceReport:
    machine: dict[str, Any]
    options: dict[str, Any]
    sections: list[ReportSection] = field(default_factory=list)

    @property
    def checks(self) -> Iterator[tuple[ReportSection, Check]]:
        return ((section, check) for section in self.sections for check in section.checks)

    @property
    def failed(self) -> list[str]:
        """The names of checks that failed, with their section."""
        return [f"{s.title}: {c.name}" for s, c in self.checks if c.status == "failed"]

    def count(self, status: str) -> int:
        return sum(check.status == status for _, check in self.checks)

    @property
    def verdict(self) -> str:
        shown = ", ".join(
            f"{self.count(status)} {status}" for status in COLORS if self.count(status)
        )
        return f"{'FAILED' if self.failed else 'accepted'}: {shown}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "failed": self.failed,
            "machine": self.machine,
            "options": self.options,
            "sections": [asdict(section) for section in self.sections],
        }

    def write(self, directory: Path) -> tuple[Path, Path]:
        """`acceptance.json` and `acceptance.html` there."""
        directory.mkdir(parents=True, exist_ok=True)
        record, page = directory / "acceptance.json", directory / "acceptance.html"
        replace_text(record, json.dumps(self.to_dict(), indent=1) + "\n")
        replace_text(page, "".join(page_of(self)))
        return record, page


def lines_of(section: ReportSection) -> Iterator[str]:
    """For the console, a line a check."""
    yield f"{section.title} ({section.seconds:.0f} s)"
    width = max((len(check.name) for check in section.checks), default=0)
    for check in section.checks:
        figures = ", ".join(
            f"{name} {_shown(value)}" for name, value in check.figures.items() if value is not None
        )
        told = "; ".join(part for part in (figures, check.detail) if part)
        yield f"  {check.status:<9}  {check.name:<{width}}  {told}".rstrip()


# -- as a page --------------------------------------------------------------------------------

STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {TEXT}; max-width: 62em; margin: 2em auto;
  padding: 0 1em; }}
h1 {{ font-size: 1.5em; margin-bottom: .2em; }} h2 {{ font-size: 1.15em; margin: 1.8em 0 .2em; }}
p {{ margin: .2em 0 .6em; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: .25em .8em .25em 0;
  border-bottom: 1px solid {FAINT}; }}
th {{ font-weight: 600; }} td.figure, th.figure {{ text-align: right; white-space: nowrap; }}
td.status {{ white-space: nowrap; font-weight: 600; }}
.verdict {{ font-size: 1.15em; font-weight: 600; }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: .1em 1.2em; margin: .5em 0; }}
dt {{ color: #777; }} dd {{ margin: 0; }} .scroll {{ overflow-x: auto; }}
"""


def page_of(report: AcceptanceReport) -> Iterator[str]:
    color = RED if report.failed else GREEN
    yield '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width">\n'
    yield f"<title>Acceptance: {html.escape(report.verdict)}</title>\n<style>{STYLE}</style>\n"
    yield "<h1>Fourfold: acceptance of a machine</h1>\n"
    yield f'<p class="verdict" style="color:{color}">{html.escape(report.verdict)}</p>\n'
    if report.failed:
        yield f"<p>Failed: {html.escape('; '.join(report.failed))}</p>\n"
    yield _described({**report.machine, **report.options})
    for section in report.sections:
        yield from _section(section)
    yield "</html>\n"


def _described(facts: dict[str, Any]) -> str:
    rows = "".join(
        f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(_words(value))}</dd>\n"
        for name, value in facts.items()
    )
    return f"<dl>\n{rows}</dl>\n"


def _section(section: ReportSection) -> Iterator[str]:
    columns = section.columns
    detailed = any(check.detail for check in section.checks)
    took = f" ({section.seconds:.0f} s)" if section.seconds else ""
    yield f"<h2>{html.escape(section.title)}{took}</h2>\n<p>{html.escape(section.about)}</p>\n"
    heads = [_cell("th", name, "figure") for name in columns]
    rows = "".join(_row(check, columns, detailed) for check in section.checks)
    yield (
        '<div class="scroll"><table>\n<tr><th>result</th><th>what</th>'
        f"{''.join(heads)}{'<th></th>' if detailed else ''}</tr>\n{rows}</table></div>\n"
    )


def _row(check: Check, columns: list[str], detailed: bool) -> str:
    status = f'<td class="status" style="color:{COLORS[check.status]}">{check.status}</td>'
    figures = [_cell("td", _shown(check.figures.get(name)), "figure") for name in columns]
    detail = _cell("td", check.detail) if detailed else ""
    return f"<tr>{status}{_cell('td', check.name)}{''.join(figures)}{detail}</tr>\n"


def _cell(tag: str, text: str, kind: str = "") -> str:
    return f"<{tag}{f' class={kind!r}' if kind else ''}>{html.escape(text)}</{tag}>"


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0 or isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:,.4g}"


def _words(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)
