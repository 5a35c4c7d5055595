"""The documentation site: Sphinx with MyST, Furo and MathJax, built without a network.

    sphinx-build -W --keep-going -c docs -d build/doctrees . build/site

The source folder is the repository, so that notebooks, gallery and measurements are shown from
where they lie and their relative links hold on the site as they do in a file browser.
"""

import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_site")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

from jaxttp import __version__  # noqa: E402

project, author, copyright = "jaxttp", "The jaxttp authors", "The jaxttp authors"
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_nb",
    "sphinx_copybutton",
    "extension",
]

# What is read.
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/guides/*.md",
    "docs/explanations/*.md",
    "docs/commands/*",
    "docs/reference/*.rst",
    "notebooks/*.ipynb",
    "experiments/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".venv*", ".git", "build", "dist", "**.ipynb_checkpoints", "docs/_site"]

# Pages and notebooks; the stored outputs are shown, nothing is executed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_number_source_lines = False
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 4
highlight_language = "none"

# The reference, from docstrings.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "notes_style")]
default_role = "py:obj"

# Mathematics: one file of MathJax, from a package; its glyphs are inside.
_mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
if _mathjax is None or not _mathjax.submodule_search_locations:
    raise ImportError("sphinx-mathjax-offline is not installed; pip install -e '.[docs]'")
_mathjax_file = Path(_mathjax.submodule_search_locations[0], "static", "mathjax", "tex-svg.js")
mathjax_path = "tex-svg.js"
mathjax3_config = {
    "options": {"enableMenu": False},
    "svg": {"fontCache": "global", "displayAlign": "left", "displayIndent": "1.5em"},
}

# A build needs no network, so links to other hosts are not tried, and sphinx.ext.intersphinx is not
# used. MyST warns of internal links and anchors without a target.
linkcheck_ignore = [r"https?://"]

# The look.
html_theme = "furo"
html_title = "jaxttp"
html_static_path = ["_site/static", str(_mathjax_file)]
html_extra_path = ["_site/top"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "github-dark"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
