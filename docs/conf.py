"""Sphinx: the site made of README.md, docs/ and the docstrings. `make docs` runs it; no page needs the network."""

import importlib.util
import re
from pathlib import Path

import mlx_lstm

ROOT = Path(__file__).parents[1]

project, author, copyright = "mlx-lstm", "The mlx-lstm authors", "the mlx-lstm authors, MIT licence"
release = version = mlx_lstm.__version__
html_title = f"mlx-lstm {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
extensions += ["sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

# Markdown: what GitHub shows, the site shows

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3

PAGES = {
    "index": "README.md",
    "contributing": "CONTRIBUTING.md",
    "shaders": "metal/README.md",
    "emulator": "tests/metal_emulator/README.md",
    "machine_code": "tests/machine_code/README.md",
    "changelog": "CHANGELOG.md",
}
"""Pages that stand elsewhere in the repository, where GitHub shows them. docs/ holds a line in place of each."""


def page_from_elsewhere(app, name, source):
    """The text of such a page, with links as they are from docs/, and links to such pages."""
    if name in PAGES:
        place = ROOT / PAGES[name]
        links = re.compile(r"(?<=\]\()(?!https:|#)([^)\s]+)")
        text = links.sub(lambda link: from_docs(place.parent / link[1]), place.read_text())
        source[0] = text + source[0].partition("<!-- only on the site -->")[2]
    for page, path in PAGES.items():
        source[0] = source[0].replace(f"](../{path}", f"]({page}.md")


def from_docs(path):
    """A path in the repository as docs/ sees it."""
    path = path.resolve().relative_to(ROOT).as_posix()
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


# Docstrings: Google's style, and single backticks for code

default_role = "code"
highlight_language = "none"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_preserve_defaults = True
add_module_names = False
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_param = napoleon_use_rtype = False  # several names may share a line
python_maximum_signature_line_length = 100


def as_markup(app, what, name, obj, options, lines):
    """Our docstrings are plain text: |c[t]| is no substitution, what is indented between paragraphs stays as it is."""
    text = re.sub(r"\|(?=\w)", r"\|", "\n".join(lines))
    text = re.sub(r"^( +)(\w+(?:, \w+)*,)\n +([\w, ]+:)", r"\1\2 \3", text, flags=re.MULTILINE)  # names on two lines
    text = re.sub(r"^(?!\.\. )(\S.*)\n\n(?=    \S)", r"\1\n\n::\n\n", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def is_left_out(app, what, name, obj, skip, options):
    """Of a class only its call: a tuple's docstring has its fields, and the rest of a layer is no reader's business."""
    return True if what == "class" and name != "__call__" else skip


# Equations: one file of MathJax beside the pages, which draws them without fonts to fetch

MATHJAX = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
html_static_path = [str(MATHJAX / "tex-svg-full.js"), "site.css"]
mathjax_path = "tex-svg-full.js"
mathjax3_config = {"tex": {"packages": {"[+]": ["textmacros"]}}}


def setup(app):
    app.connect("source-read", page_from_elsewhere)
    app.connect("autodoc-process-docstring", as_markup, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", is_left_out)
