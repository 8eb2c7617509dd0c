#!/usr/bin/env bash
# Make .venv-bridge, Megatron-Bridge over another environment: bridge_env.sh BASE [VERSION MEGATRON TRANSFORMERS]
# BASE is a ready environment, of which everything else is used (torch, Megatron, pytest). Ready ones are kept.
# With a VERSION of Bridge, .venv-bridge-VERSION, which has these versions of megatron-core and transformers.
set -euo pipefail
base=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
version=${2:-0.6.2}
folder=.venv-bridge${2:+-$2}

stamp="$folder/ready-$( (cat .ci/bridge_env.sh .ci/layer_env.sh; echo "$base") | cksum | cut -d' ' -f1)"
[ -e "$stamp" ] && exit 0
.ci/layer_env.sh "$folder" "$base"
install() {
    "$folder/bin/pip" install --quiet --disable-pip-version-check "$@" 2>&1 |
        { grep -vE "is ignored: it is neither|dependency resolver|which is not installed" || true; }
}
# Of what Bridge requires, that which it imports on a CPU; tests/bridge/bridge_on_cpu.py stands in for the rest.
install --no-deps "megatron-bridge==$version"
[ $# -lt 3 ] || install --no-deps --ignore-installed "megatron-core==$3"
install accelerate datasets hydra-core peft tensorboard "transformers==${4:-5.12.1}"
"$folder/bin/python" -c "import tests.bridge.bridge_on_cpu, megatron_hecate.bridge" >"$folder/log" 2>&1 || {
    tail -5 "$folder/log" >&2
    echo "Setting up $folder failed: its Python cannot import megatron.bridge" >&2
    exit 1
}
touch "$stamp"
