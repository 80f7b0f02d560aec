"""The blocks of a report as Markdown, as one self-contained HTML page, and as LaTeX with booktabs."""

from __future__ import annotations

import base64
import html
import re
import unicodedata
from collections.abc import Mapping, Sequence
from importlib import resources

from raysim.report.document import Block, Heading, Items, Picture, Table, Text


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """GitHub's Markdown; figures are links to PNG files."""
    parts = [f"# {_md(title)}"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"## {_md(text)}")
            case Text(text, warning):
                parts.append(f"> **Note:** {_md(text)}" if warning else _md(text))
            case Items(items):
                parts.append("\n".join(f"* {_md(item)}" for item in items))
            case Picture(name, caption, alt):
                parts.append(f"![{_md(alt)}](figures/{name}.png)\n\n*{_md(caption)}*")
            case Table():
                parts.append(f"*{_md(block.caption)}*\n\n{_md_table(block)}")
    return "\n\n".join(parts) + "\n"


def _md_table(table: Table) -> str:
    rule = [":--" if i < table.words else "--:" for i in range(len(table.columns))]
    lines = [tuple(_md(cell) for cell in table.columns), rule, *(tuple(_md(c) for c in row) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md(text: str) -> str:
    """Text whose letters mean themselves in Markdown, also inside a table; HTML in it stays text."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|$~>])", r"\\\1", text)


def web_page(title: str, blocks: Sequence[Block], pictures: Mapping[str, bytes]) -> str:
    """One HTML file that asks for nothing from anywhere.

    Args:
        title: Of the page.
        blocks: Its content.
        pictures: SVG files by name of the figure.
    """
    body = []
    for block in blocks:
        match block:
            case Heading(text):
                body.append(f"<h2>{html.escape(text)}</h2>")
            case Text(text, warning):
                kind = ' class="warning"' if warning else ""
                body.append(f"<p{kind}>{html.escape(text)}</p>")
            case Items(items):
                body.append(f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>")
            case Picture(name, caption, alt):
                # As an image, so that names inside one drawing cannot clash with those of another.
                source = f"data:image/svg+xml;base64,{base64.b64encode(pictures[name]).decode()}"
                body.append(
                    f'<figure id="{name}"><div class="wide" tabindex="0"><img src="{source}" alt="{html.escape(alt)}"></div>'
                    f"<figcaption>{html.escape(caption)}</figcaption></figure>"
                )
            case Table():
                body.append(_html_table(block))
    style = resources.files("raysim.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _html_table(table: Table) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="word"' if i < table.words else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True))

    lines, before = [], None
    for row in table.rows:
        # A thin line where the first column changes.
        new = ' class="new"' if before is not None and row[0] != before and table.words > 1 else ""
        lines.append(f"<tr{new}>{cells('td', row)}</tr>")
        before = row[0]
    return (
        f'<div class="wide" tabindex="0"><table id="{table.name}"><caption>{html.escape(table.caption)}</caption>'
        f"<thead><tr>{cells('th', table.columns)}</tr></thead>\n<tbody>{''.join(lines)}</tbody></table></div>"
    )


_PREAMBLE = r"""% Tables need booktabs and longtable, figures graphicx. Compiles with pdflatex, xelatex and lualatex.
\documentclass[10pt]{article}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage[a4paper,landscape,margin=2cm]{geometry}
\usepackage{booktabs,longtable,graphicx}
\setlength{\tabcolsep}{4pt}
\setlength{\LTcapwidth}{\linewidth}
\begin{document}
"""


def latex(title: str, blocks: Sequence[Block]) -> str:
    """A document whose tables can be copied into a paper; figures are PDF files beside it."""
    parts = [f"\\section*{{{tex(title)}}}"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"\\subsection*{{{tex(text)}}}")
            case Text(text, _):
                parts.append(tex(text))
            case Items(items):
                lines = "\n".join(f"\\item{{}} {tex(item)}" for item in items)
                parts.append(f"\\begin{{itemize}}\n{lines}\n\\end{{itemize}}")
            case Picture(name, caption, _):
                parts.append(
                    "\\begin{figure}[htbp]\n\\centering\n"
                    f"\\includegraphics[width=\\linewidth,height=0.75\\textheight,keepaspectratio]{{figures/{name}.pdf}}\n"
                    f"\\caption{{{tex(caption)}}}\n\\label{{fig:{name}}}\n\\end{{figure}}"
                )
            case Table():
                parts.append(_tex_table(block))
    return _PREAMBLE + "\n\n".join(parts) + "\n\\end{document}\n"


def _tex_table(table: Table) -> str:
    def line(row: Sequence[str]) -> str:
        # Braces around the first cell: one that begins with a bracket would be an argument of the line break before it.
        return " & ".join(f"{{{tex(cell)}}}" if i == 0 else tex(cell) for i, cell in enumerate(row)) + r" \\"

    kinds = "".join("l" if i < table.words else "r" for i in range(len(table.columns)))
    lines, before = [], None
    for row in table.rows:
        if before is not None and row[0] != before and table.words > 1:
            lines.append(r"\addlinespace")
        lines.append(line(row))
        before = row[0]
    head = f"\\toprule\n{line(table.columns)}\n\\midrule"
    rows = "\n".join(lines)
    caption = f"\\caption{{{tex(table.caption)}}}\\label{{tab:{table.name}}}"
    return (
        f"{{\\footnotesize\n\\begin{{longtable}}{{@{{}}{kinds}@{{}}}}\n{caption}\\\\\n{head}\n\\endfirsthead\n{head}\n\\endhead\n"
        f"\\bottomrule\n\\endlastfoot\n{rows}\n\\end{{longtable}}}}"
    )


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def tex(text: str) -> str:
    """Text whose letters mean themselves in LaTeX; a letter that its Western fonts lack becomes its code point."""
    return "".join(_tex_letter(letter) for letter in " ".join(text.split()))


def _tex_letter(letter: str) -> str:
    if letter in _TEX:
        return _TEX[letter]
    if letter.isascii() or (letter <= "\u017f" and unicodedata.category(letter).startswith("L")):
        return letter
    return f"[U+{ord(letter):04X}]"
