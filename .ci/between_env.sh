#!/usr/bin/env bash
# Make .venv-VERSION, another megatron-core over a ready environment: between_env.sh BASE VERSION
# All but Megatron is that of BASE, which needs Python 3.12. Ready ones are kept.
set -euo pipefail
base=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
folder=.venv-$2

stamp="$folder/ready-$( (cat .ci/between_env.sh .ci/layer_env.sh; echo "$base") | cksum | cut -d' ' -f1)"
[ -e "$stamp" ] && exit 0
.ci/layer_env.sh "$folder" "$base"
"$folder/bin/pip" install --quiet --disable-pip-version-check --ignore-installed --no-deps "megatron-core==$2" 2>&1 |
    { grep -v "is ignored: it is neither a file nor a directory" || true; }
found=$("$folder/bin/python" -c "import importlib.metadata, megatron.core, megatron_hecate; print(importlib.metadata.version('megatron-core'))" 2>"$folder/log") || true
[ "$found" = "$2" ] || {
    tail -5 "$folder/log" >&2
    echo "Setting up $folder failed: its Python has megatron-core '$found', not $2" >&2
    exit 1
}
touch "$stamp"
