"""Scripts that make the figures, tables and files of the project; each is a module to run."""
