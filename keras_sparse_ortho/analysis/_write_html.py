"""`write_html`: reports with their pictures on one page that can be sent around."""

import base64
import html
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from keras_sparse_ortho._checks import as_text, other_keywords
from keras_sparse_ortho._files import atomic_write, path_of
from keras_sparse_ortho._pictures import check_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@runtime_checkable
class Pictured(Protocol):
    """A report that can be drawn."""

    def plot(self) -> "Axes":
        """Draws the report with Matplotlib."""


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{
  font: 16px/1.5 system-ui, sans-serif;
  max-width: 70rem;
  margin: 2rem auto;
  padding: 0 1rem;
}}
pre {{
  font-size: 0.8rem;
  line-height: 1.35;
  overflow-x: auto;
  background: #f5f5f5;
  padding: 1rem;
}}
img {{ max-width: 100%; background: white; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #16181d; color: #e6e6e6; }}
  pre {{ background: #22252c; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{sections}
</body>
</html>
"""


@other_keywords
def write_html(
    path: str | os.PathLike[str],
    reports: Mapping[str, object],
    *,
    title: str = "A Keras model",
) -> None:
    """Writes reports, each with its picture, as one HTML file without links to others.

    Args:
        path: str or path. The file to write, which replaces one of that name.
        reports: dict from headings to reports: what `shrink`, `widths`, `sensitivity`,
            `int8_errors`, `report` and `export_litert` return. A report without a picture shows
            its text alone.
        title: str. The title of the page.

    Raises:
        TypeError: No dict of headings.
        ValueError: No reports.
        ImportError: Reports with pictures, without Matplotlib: `pip install
            keras-sparse-ortho[plot]`.

    Examples:
        >>> import keras, pathlib, tempfile
        >>> from keras_sparse_ortho import analysis
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.html"
        >>> analysis.write_html(file, {"Kernels": analysis.report(model)})
        >>> "a/kernel" in file.read_text()
        True
    """
    file = path_of("path", path)
    if not isinstance(reports, Mapping):
        raise TypeError(
            "`reports` must be a dict from headings to reports, as {'Widths': table}. Received: "
            f"reports={as_text(reports)}"
        )
    if not reports:
        raise ValueError("`reports` must have a report. Received: reports={}")
    pictured = [
        heading
        for heading, report in reports.items()
        if isinstance(report, Pictured)
    ]
    if pictured:
        check_matplotlib(received=f"{pictured}")
    sections = [
        _section(heading, report) for heading, report in reports.items()
    ]
    page = _PAGE.format(title=html.escape(title), sections="\n".join(sections))
    with atomic_write(file) as stream:
        stream.write(page)


def _section(heading: str, report: object) -> str:
    lines = [f"<h2>{html.escape(str(heading))}</h2>"]
    if isinstance(report, Pictured):
        picture = _picture(report, heading)
        if picture is not None:
            lines.append(picture)
    lines.append(f"<pre>{html.escape(str(report))}</pre>")
    return "\n".join(lines)


def _picture(report: Pictured, heading: str) -> str | None:
    """The picture of a report as an image; `None` if this one has nothing to draw."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    try:
        axes = report.plot()
    except ValueError:  # as of an export whose files were not timed
        return None
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", bbox_inches="tight")
    plt.close(figure)
    encoded = base64.b64encode(stream.getvalue()).decode("ascii")
    label = html.escape(str(heading))
    return f'<img alt="{label}" src="data:image/svg+xml;base64,{encoded}">'
