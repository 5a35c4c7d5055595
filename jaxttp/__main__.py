"""`python -m jaxttp` is `jaxttp`."""

from jaxttp.cli import main

main()
