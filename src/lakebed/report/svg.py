"""Elements as text. Every attribute and every text goes through `escape`, so no input can become markup."""

from __future__ import annotations

from html import escape as _escape

# Control characters are not allowed in XML and confuse terminals: they are shown as a replacement character.
_CONTROLS = dict.fromkeys({*range(32), 127, *range(0xD800, 0xE000)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")


def escape(text: object) -> str:
    return _escape(str(text).translate(_CONTROLS), quote=True)


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; `children` are markup already, attribute values are not. A trailing or inner _ in a name is a -."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{_number(value)}"' for key, value in given.items())
    return f"<{name}{written}>{''.join(children)}</{name}>"


def label(words: object, x: float, y: float, **attributes: object) -> str:
    return tag("text", escape(words), x=x, y=y, **attributes)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(value)
