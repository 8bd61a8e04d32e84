"""How the documentation is built: `make docs`. Nothing here asks the network."""

from __future__ import annotations

import pathlib
from typing import Any

import fzero

HERE = pathlib.Path(__file__).parent

project, author, copyright = "fzero", "the authors of fzero", "the authors of fzero"
version = release = fzero.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
nitpicky = False

# ---- pages

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {"version": version}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---- notebooks: executed in the build, and their outputs kept until the notebook changes

nb_execution_mode = "cache"
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_merge_streams = True

# ---- the API: every public name under `fzero`, whatever module defines it

toc_object_entries = False  # every name has a heading already
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]
default_role = "literal"  # single backticks in docstrings

# ---- links to others, from inventories that docs/inventories/update.py keeps here

intersphinx_mapping = {
    name: (base, str(HERE / "inventories" / f"{name}.inv"))
    for name, base in {
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
    }.items()
    if (HERE / "inventories" / f"{name}.inv").exists()
}
intersphinx_timeout = 1

# ---- looks

html_theme, pygments_style, pygments_dark_style = "furo", "default", "github-dark"
html_title = f"fzero {version}"
html_static_path = ["_static"]
html_css_files = ["fzero.css"]
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(HERE / "scorer.js")
html_theme_options: dict[str, Any] = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb3f0", "color-brand-content": "#7fb3f0"},
}
