"""What `relaunch plan --compare` prints: a line for each value that differs, the two versions side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

# Between columns, as in the other tables.
_GAP = 2


def render(document: Mapping[str, Any]) -> RenderableType:
    """A rich renderable of the document of `supervisor.comparison.compare_with`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    plan = document["plan"]
    fits = "fits" if plan["feasible"] else "does not fit"
    head = Text(f"{(plan.get('model') or {}).get('id')}: {fits} here", style="bold")
    if document["same"]:
        return Group(head, Text(f"the same plan as {document['other']}: nothing changes", style="green"))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for title in ("what", f"{document['other']} (other)", "here"):
        table.add_column(title, overflow="fold")
    part = None
    for row in document["changes"]:
        if row["part"] != part:
            part = row["part"]
            table.add_row(Text(part, style="italic"), "", "")
        table.add_row(*(Text(text) for text in (f"  {row['name']}", _value(row, "from"), _value(row, "to"))))
    reasons = [f"{row['name']}: {row['reason']}" for row in document["changes"] if row["reason"]]
    whys = [Text("why, here", style="italic"), *(Text(f"  {line}") for line in reasons)] if reasons else []
    misfits = [Text(f"  - {reason}", style="red") for reason in plan.get("reasons") or ()]
    return Group(head, *misfits, table, *whys)


def _value(row: Mapping[str, Any], side: str) -> str:
    value = row[side]
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and str(row["name"]).endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, int) and abs(value) > 9999:
        return f"{value:,}"
    return str(value)
