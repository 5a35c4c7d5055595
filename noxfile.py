"""The quick part of the suite on every Python that is there, in environments of its own.

    nox                    all Pythons; one that is missing is passed over
    nox -s quick-3.13      one of them
    nox -s jax             the oldest JAX that is allowed, and the newest
    nox -s quick-3.12 -- tests/ntk -k spectrum      what follows goes to pytest

What has to pass before anything lands is `.ci/run`.
"""

import os

import nox

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
QUICK = ("python", "-m", "pytest", "-q", "-m", "not slow")
# Flax names the JAX that it needs; 0.12.8 is the oldest that is allowed.
OLDEST = ("jax==0.10.0", "jaxlib==0.10.0", "flax==0.12.8")

nox.options.sessions = ["quick"]
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=PYTHONS)
def quick(session: nox.Session) -> None:
    """README's first command without its training, then the tests that are not slow."""
    session.install("-e", ".[test]")
    session.run("jaxttp", "predict", "--quiet", "--output", session.create_tmp())
    session.run(*QUICK, *session.posargs)


@nox.session
@nox.parametrize("which", ["oldest", "newest"])
def jax(session: nox.Session, which: str) -> None:
    """The same with the oldest JAX that is allowed, or with the newest."""
    if which == "oldest":
        session.install("-e", ".[test]", *OLDEST)
    else:
        session.install("--upgrade", "-e", ".[test]", "jax", "jaxlib", "flax")
    session.run(*QUICK, *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The same with the JAX of last night, from the index that JAX_NIGHTLY_INDEX names.

    JAX's installation guide says which; those packages are not on the index of releases.
    """
    session.install("-e", ".[test]")
    index = os.environ.get("JAX_NIGHTLY_INDEX")
    where = ("--index-url", index) if index else ()
    session.install("--upgrade", "--pre", "jax", "jaxlib", *where)
    session.run(*QUICK, *session.posargs)
