"""Sphinx: the site made of README.md, docs/ and the docstrings. `make docs` runs it; no page needs the network."""

import importlib.util
import re
from pathlib import Path

from docutils import nodes
from sphinx.util.nodes import make_refnode

import mlx_lstm

ROOT = Path(__file__).parents[1]

project, author, copyright = "mlx-lstm", "The mlx-lstm authors", "the mlx-lstm authors, MIT licence"
release = version = mlx_lstm.__version__
html_title = f"mlx-lstm {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
extensions += ["sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("search.js"))
pygments_dark_style = "github-dark"  # furo's own choice underlines the names of modules, as if they were links
html_show_sphinx = False
html_copy_source = False

# The copy button takes code without prompts and outputs; blocks of output have no button.

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

# Markdown: the site shows what GitHub shows.

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
"""Pages whose text stands elsewhere in the repository, where GitHub shows it. docs/ has a one-line page for each."""


def page_from_elsewhere(app, name, source):
    """Replace a one-line page by its text; adjust relative links; on the gallery add each example's code."""
    if name in PAGES:
        place = ROOT / PAGES[name]
        links = re.compile(r"(?<=\]\()(?!https:|#)([^)\s]+)")
        text = links.sub(lambda link: from_docs(place.parent / link[1]), place.read_text())
        source[0] = text + source[0].partition("<!-- only on the site -->")[2]
    if name == "gallery":
        code = (
            "<details><summary>The code of {0}</summary>\n\n```{{literalinclude}} ../{0}\n:language: python\n```\n\n"
            "</details>\n\n```sh\n.venv/bin/python {0}\n"
        )
        source[0] = re.sub(r"```sh\n\S+ (\S+)\n", lambda command: code.format(command[1]), source[0])
    for page, path in PAGES.items():
        source[0] = source[0].replace(f"](../{path}", f"]({page}.md")


def from_docs(path):
    """Return a path of the repository relative to docs/."""
    path = path.resolve().relative_to(ROOT).as_posix()
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


def link_names(app, doctree, page):
    """Make code such as `mlx_lstm.nn.LSTM` on a Markdown page a link to its entry in the API."""
    entries = app.env.domaindata["py"]["objects"] | app.env.domaindata["py"]["modules"]
    for code in list(doctree.findall(nodes.literal)):
        name = re.sub(r"\(.*\)$", "", code.astext())
        if name.startswith("mlx_lstm.") and name in entries and not isinstance(code.parent, nodes.reference):
            entry = entries[name]
            code.replace_self(make_refnode(app.builder, page, entry.docname, entry.node_id, [code.deepcopy()]))


# Docstrings: Google's style. Single backticks are code, and a link where the name has an entry.

default_role = "py:obj"
highlight_language = "none"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_param = napoleon_use_rtype = False  # several names may share a line
python_maximum_signature_line_length = 100

MEMBERS = {"__call__", "step", "stepper", "engine_used", "from_layer", "to_float"}
"""What the pages show of a class. The rest of a layer is `mlx.nn.Module`'s; the fields of a tuple are in its text."""


def as_markup(app, what, name, obj, options, lines):
    """Our docstrings are plain text: |c[t]| is no substitution, indented text between paragraphs is preformatted."""
    text = re.sub(r"\|(?=\w)", r"\|", "\n".join(lines))
    text = re.sub(r"^( +)(\w+(?:, \w+)*,)\n +([\w, ]+:)", r"\1\2 \3", text, flags=re.MULTILINE)  # names on two lines
    text = re.sub(r"^(?!\.\. )(\S.*)\n\n(?=    \S)", r"\1\n\n::\n\n", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def is_left_out(app, what, name, obj, skip, options):
    """Leave out what is not in MEMBERS, and an inherited method that has the text of another class's page."""
    return True if what == "class" and name not in MEMBERS else skip


# Equations: one file of MathJax beside the pages, which draws them without fonts to fetch.

MATHJAX = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
html_static_path = [str(MATHJAX / "tex-svg-full.js"), "site.css"]
mathjax_path = "tex-svg-full.js"
mathjax3_config = {"tex": {"packages": {"[+]": ["textmacros"]}}}


def setup(app):
    app.connect("source-read", page_from_elsewhere)
    app.connect("autodoc-process-docstring", as_markup, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", is_left_out)
    app.connect("doctree-resolved", link_names)
