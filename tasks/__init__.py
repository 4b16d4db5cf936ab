"""The stages: one module a DAG stage, each a program (`python -m tasks.STAGE`)."""
