#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Does vLLM get KV back from kvferryd, here? See quickstart.py: quickstart.sh --model FOLDER
#
# Python: $PYTHON, else python3, of the environment that has vllm and the kvferry wheel.
set -euo pipefail
folder=$(dirname "$(readlink -f "$0")")
exec "${PYTHON:-python3}" -B "$folder/quickstart.py" "$@"
