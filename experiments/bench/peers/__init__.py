"""jaxttp beside its peers: the same work, in one run, both answers checked before a clock starts.

    python -m experiments.bench.peers setup [NAME...]     # the peers' environments
    python -m experiments.bench.peers run --all           # every row; or rows and groups by name
    python -m experiments.bench.peers table               # Markdown of what was measured

`rows` says what is measured, `harness` how; `workers` hold the calls, each to be run by the Python
of its own environment, so modules here and in `workers` import jaxttp only where that is ours.
"""
