from __future__ import annotations

from html.parser import HTMLParser

import pytest

from raysim.report import document
from raysim.report.document import Heading, Items, Picture, Table, Text, table
from raysim.report.pages import latex, markdown, tex, web_page

NASTY = r"a_b & <script>alert(1)</script> | 50% é {x} \n $y$ #1 ~ ^ [z] *k* `c`"


class Reader(HTMLParser):
    """Text and tags of a page; raises where a tag is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


BLOCKS = [
    Heading(NASTY),
    Text(NASTY, warning=True),
    Items((NASTY, "[first]")),
    Picture("curves", NASTY, NASTY),
    Table("t", NASTY, ("condition", NASTY), ((NASTY, "1.0 ± 0.5"), ("[b]", NASTY)), words=1),
]


def test_html_shows_every_letter_and_asks_for_nothing():
    page = web_page(NASTY, BLOCKS, {"curves": b"<svg/>"})
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert "script" not in {tag for tag, _ in reader.seen}
    # Title twice; heading, paragraph, item, caption of figure and table, column, two cells.
    assert reader.text.count(NASTY) == 10
    for tag, attributes in reader.seen:
        for name, value in attributes.items():
            assert name not in ("href", "srcset", "onload"), tag
            assert name != "src" or value.startswith("data:image/svg+xml;base64,")
    assert "@import" not in page
    assert "url(" not in page


def test_markdown_keeps_its_columns():
    text = markdown("title", BLOCKS)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    for line in lines:
        assert line.replace("\\|", "").count("|") == 3
    assert "<script" not in text
    assert r"a\_b &amp; &lt;script" in text


def test_latex_escapes_every_special_letter():
    assert tex(r"\ _&%$#{}~^<>|") == (
        r"\textbackslash{} \_\&\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}"
    )
    assert tex("é ± ü") == "é $\\pm$ ü"
    assert tex("\u6570 \U0001f600") == "[U+6570] [U+1F600]"
    text = latex("title", BLOCKS)
    assert text.count("\\begin{longtable}") == text.count("\\end{longtable}") == 1
    # A cell or an item that begins with a bracket would be an argument.
    assert "\n{[b]} & " in text
    assert "\\item{} [first]" in text


@pytest.mark.slow
def test_latex_compiles(tmp_path):
    import shutil
    import subprocess

    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex")
    from raysim.report.figures import Drawing, _figure, _saved

    (tmp_path / "figures").mkdir()
    drawing = _saved(_figure(2, 1))
    assert isinstance(drawing, Drawing)
    drawing.write(tmp_path / "figures", "curves")
    (tmp_path / "report.tex").write_text(latex(NASTY, BLOCKS), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=200)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "report.pdf").stat().st_size > 1000


def test_tables_drop_columns_that_say_nothing_and_rows_beyond_the_limit():
    rows = [["", f"m{i}", "-", str(i)] for i in range(5)]
    found = table("t", "Caption.", ["condition", "method", "busy", "n"], rows, most=3)
    assert found.columns == ("method", "n")
    assert (found.words, len(found.rows)) == (1, 3)
    assert found.caption == "Caption. The first 3 of 5 rows; report.json has all."


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00123, "0.00123"), (12.3456, "12.3"), (1234.5, "1,234"), (1234567.0, "1,234,567"), (1e-7, "0")],
)
def test_numbers_have_no_exponent(value, text):
    assert document.number(value) == text


def test_numbers_for_people():
    assert document.mean_sd({"mean": 0.5, "sd": 0.0123}) == "50.0 ± 1.2"
    assert document.mean_sd({"mean": 0.5, "sd": None}) == "50.0"
    assert document.percent(None) == "-"
    assert [document.size(n) for n in (None, 0, 999, 1500, 2_500_000, 3e9)] == [
        "-",
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3 GB",
    ]
    assert document.p_text(0.00001) == "< 0.0001"
    assert document.interval({"value": -0.5, "low": -1.0, "high": 0.25}, 100, 1, signed=True) == "-50.0 [-100.0, 25.0]"
    assert document.interval({"value": 0.5, "low": None, "high": None}) == "0.50"
    assert document.interval(None) == "-"
