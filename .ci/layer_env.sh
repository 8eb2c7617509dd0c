#!/usr/bin/env bash
# Make a virtual environment that sees all packages of another one: layer_env.sh FOLDER BASE
set -euo pipefail
echo "Setting up $1 over $2 (half a minute, once)"
rm -rf "$1"
"$2/bin/python" -m venv "$1"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
printf '%s\n' "$("$2/bin/python" -c "$site")" "$PWD" >"$("$1/bin/python" -c "$site")/base.pth"
ln -s "$2/transformer_engine" "$1/transformer_engine" # where tests/support/cpu/te_on_cpu.py looks for it
