#!/usr/bin/env bash
# The random campaigns on a machine with a GPU: calls, invariance on both GPU kernels, caches, selections. Installs nothing.
# Run from the root of the repository. Options as of `python -m tests.campaign --help`, such as --jobs 16 --seconds 300 --first 0.
PYTHONPATH="$PWD/src:$PWD" exec "${PYTHON:-python3}" -m tests.campaign "$@"
